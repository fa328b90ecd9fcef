"""The progress line at a terminal and in a log file."""

import io

from rich.console import Console

from vitscale.training.deepspeed.progress import TrainingProgress

FIGURES = {"loss": 0.5, "lr": 1e-3, "images_per_s": 1234.5}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def progress_of(total_steps, **console):
    """A progress line, its clock, and what it writes to."""
    out, clock = io.StringIO(), Clock()
    return TrainingProgress(total_steps=total_steps, console=Console(file=out, **console), clock=clock), clock, out


def test_plain_lines_come_now_and_then_and_at_the_end():
    progress, clock, out = progress_of(100)
    with progress:
        for step in range(10, 101, 10):
            progress.update(step, loss=1 / step, lr=8e-4, images_per_s=1234.5)
            clock.now += 10
        progress.note("saved [checkpoint]")
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 10/100  loss 0.1000  lr 8.00e-04  1,234.5 images/s  ETA -"
    assert lines[1] == "step 40/100  loss 0.0250  lr 8.00e-04  1,234.5 images/s  ETA 0:01:00"
    assert [line.split()[1] for line in lines[:-1]] == ["10/100", "40/100", "70/100", "100/100"]
    assert lines[-1] == "saved [checkpoint]"


def test_a_terminal_shows_every_step_on_one_line_and_the_time_left_after_two():
    progress, clock, out = progress_of(10_000, force_terminal=True, width=80, color_system=None)
    with progress:
        progress.update(1, **FIGURES)
        clock.now += 2
        progress.advance(2)
        progress.note("step 2: val/top1 0.9")  # shows the live one once more
    lines = out.getvalue().replace("\r", "\n").splitlines()
    (shown,) = {line[line.index("step") :].rstrip() for line in lines if "step 2/10,000" in line}
    assert "loss 0.5000 at step 1 " in shown and "1,234.5 images/s" in shown
    assert shown.endswith("ETA 5:33:16")  # 9,998 steps of 2 s; in 80 columns
    assert any("step 2: val/top1 0.9" in line for line in lines)


def test_a_dumb_terminal_gets_plain_lines_and_a_run_that_is_done_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress, _, out = progress_of(5, force_terminal=True, width=80, color_system=None)
    with progress:
        progress.update(5, **FIGURES)
    assert out.getvalue().startswith("step 5/5  loss 0.5000") and "ETA 0:00:00" in out.getvalue()
