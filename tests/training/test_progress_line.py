"""The progress line at a terminal and in a log file."""

import io

from rich.console import Console

from vitscale.training.deepspeed.progress import TrainingProgress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_plain_lines_come_now_and_then_and_at_the_end():
    out, clock = io.StringIO(), Clock()
    with TrainingProgress(total_steps=100, console=Console(file=out), clock=clock) as progress:
        for step in range(10, 101, 10):
            progress.update(step, loss=1 / step, lr=8e-4, images_per_s=1234.5)
            clock.now += 10
        progress.note("saved [checkpoint]")
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 10/100  loss 0.1000  lr 8.00e-04  1,234.5 images/s  ETA -"
    assert lines[1] == "step 40/100  loss 0.0250  lr 8.00e-04  1,234.5 images/s  ETA 0:01:00"
    assert [line.split()[1] for line in lines[:-1]] == ["10/100", "40/100", "70/100", "100/100"]
    assert lines[-1] == "saved [checkpoint]"


def test_a_terminal_gets_one_live_line():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with TrainingProgress(total_steps=1000, console=console, clock=Clock()) as progress:
        progress.update(500, loss=0.5, lr=1e-3, images_per_s=10)
        progress.note("step 500: val/top1 0.9")
    text = out.getvalue()
    assert "step 500/1,000" in text and "loss 0.5000" in text and "10.0 images/s" in text
    assert "step 500: val/top1 0.9" in text


def test_a_terminal_shows_every_step_and_the_time_left_after_two():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with TrainingProgress(total_steps=10_000, console=console, clock=clock) as progress:
        progress.update(1, loss=0.5, lr=1e-3, images_per_s=1234.5)
        clock.now += 2
        progress.advance(2)
        progress.note("a line")  # shows the live one once more
    lines = out.getvalue().replace("\r", "\n").splitlines()
    (shown,) = {line[line.index("step") :].rstrip() for line in lines if "step 2/10,000" in line}
    assert "loss 0.5000 at step 1 " in shown and shown.endswith("ETA 5:33:16")  # 9,998 steps of 2 s; in 80 columns


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with TrainingProgress(total_steps=10, console=console, clock=Clock()) as progress:
        progress.update(1, loss=0.5, lr=1e-3, images_per_s=10)
    assert out.getvalue().startswith("step 1/10  loss 0.5000")


def test_a_process_that_finds_its_run_done_shows_the_end():
    out = io.StringIO()
    with TrainingProgress(total_steps=5, console=Console(file=out), clock=Clock()) as progress:
        progress.update(5, loss=0.5, lr=0.0, images_per_s=10)
    assert "ETA 0:00:00" in out.getvalue()
