"""`vitscale status`: against figures by hand, checkpoints as training writes them, and on damaged directories."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from messages import assert_messages
from small_files import write_files
from status_of_runs import LINES, NOW, save_checkpoint, shown, status, write_metrics, write_recipe
from typer.testing import CliRunner

from vitscale.about.status import RunReader
from vitscale.cli.main import app
from vitscale.ground.errors import RecipeError


def test_figures_by_hand(run_dir):
    (found,) = status(run_dir)
    assert (found["step"], found["total_steps"], found["world_size"]) == (20, 100, 8)
    assert found["world_sizes"] == [4, 8]
    assert (found["loss"], found["lr"], found["images_per_s"], found["exaflops"]) == (2.0, 1e-3, 2048.0, 0.2)
    assert found["left_s"] == 80 * 3.0  # at the pace of the last lines on as many devices
    assert found["data_wait"] == pytest.approx((0.5 + 0.5) / (2 + 3))
    device_hours = (10 * 2.0 * 4 + 10 * 3.0 * 8) / 3600
    assert found["hours"] == pytest.approx((20 + 30) / 3600)
    assert found["device_hours"] == pytest.approx(device_hours)
    assert found["evaluation"] == {"step": 20, "values": {"validation/top1": 0.5, "validation/loss": None}}
    assert found["best"] == {"step": 10, "metric": "validation/top1", "value": 0.75, "is_kept": False}
    assert found["trend"] is None and found["notes"] == [] and found["mfu"] is None
    write_metrics(run_dir, [LINES[0] | {"mfu": 0.4, "loss": None}])
    assert status(run_dir)[0]["mfu"] == 0.4 and "not finite" in shown(run_dir)


def test_what_people_see(run_dir):
    save_checkpoint(run_dir / "checkpoints", 20)
    text = shown(run_dir)
    assert "20 of 100 (20.0 %, 4 min 0 s left)" in text
    assert "2,048.0 images/s, 3 s a step, 8 devices (4 for other steps)" in text
    assert "5 GB at most" in text
    assert "validation/loss not finite" in text and "step 10: validation/top1 0.7500" in text


@pytest.mark.parametrize(("slope", "direction"), [(-1e-3, "falling"), (0.0, "level"), (1e-3, "rising")])
def test_the_trend_of_the_loss(run_dir, slope, direction):
    noise = np.random.default_rng(0).normal(0, 0.01, 80)
    rows = [LINES[0] | {"step": 10 * (i + 1), "loss": 3 + slope * 10 * i + noise[i]} for i in range(80)]
    rows[40]["loss"] = None  # a step whose loss was not finite
    write_metrics(run_dir, rows)
    (found,) = status(run_dir)
    lately = [row for row in rows[-50:] if row["loss"] is not None]
    fitted = np.polyfit([row["step"] for row in lately], [row["loss"] for row in lately], 1)[0]
    assert found["trend"]["change"] == pytest.approx(fitted * 490)
    assert found["trend"]["steps"] == 490 and found["trend"]["direction"] == direction


def test_slowest_rank(run_dir):
    def line(step: int, rank: str, seconds: float) -> dict:
        return LINES[0] | {"step": step, "slowest_rank": rank, "slowest_rank_s": seconds, "median_rank_s": 0.5}

    lines = [line(step, "3 (node7)", 0.8) for step in (1, 2, 3)]
    lines += [line(4, "0 (node1)", 0.51), line(5, "3 (node7)", 0.61)]
    write_metrics(run_dir, lines)
    (found,) = status(run_dir)
    expected = {"rank": "3 (node7)", "seconds": 0.61, "median_seconds": 0.5, "is_straggler": True}
    assert found["slowest_rank"] == expected | {"lines": 4, "of_lines": 5}
    assert "STRAGGLER, 1.22 x the median" in shown(run_dir)
    assert "STRAGGLER, 1.22 x the median" in shown(run_dir, run_dir.parent / "run/.")  # in a table, too
    for calm in (
        lines[1:],  # too few to tell
        [*lines[:2], lines[3], *lines[3:]],  # ranks that take turns
        [*lines[:4], line(5, "3 (node7)", 0.6)],
        [*lines[:4], lines[4] | {"step_time_s": 20.0}],  # nobody would notice
    ):
        write_metrics(run_dir, calm)
        assert not status(run_dir)[0]["slowest_rank"]["is_straggler"]


def test_steps_that_are_known_from_elsewhere(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    assert status(run_dir)[0]["step"] is None
    write_metrics(run_dir, [{"step": 8, "eval/validation/top1": 0.5}])
    assert status(run_dir)[0]["step"] == 8
    os.utime(run_dir / "metrics.jsonl", (NOW, NOW))
    save_checkpoint(run_dir / "checkpoints", 12)
    assert status(run_dir)[0]["step"] == 12
    write_metrics(run_dir, [LINES[0]])  # a run that went back: what it writes now counts
    os.utime(run_dir / "checkpoints/step-00000012/index.json", (NOW, NOW))
    assert status(run_dir)[0]["step"] == 10


def test_a_branch_has_cost_what_its_own_steps_have(run_dir):
    write_recipe(run_dir, "init={from: runs/trunk, step: 5, continue: true}")
    (found,) = status(run_dir)
    assert found["exaflops"] == pytest.approx(LINES[-2]["exaflops"] * (1 - 5 / LINES[-2]["step"]))


def test_the_pace_without_the_first_step_of_a_process(run_dir):
    first = LINES[0] | {"step": 1, "step_time_s": 50.0, "data_wait_s": 40.0}
    later = LINES[0] | {"step": 11, "step_time_s": 2.0, "data_wait_s": 0.5}
    for line in (first, later):
        del line["data_wait"]
    write_metrics(run_dir, [first, later])
    (found,) = status(run_dir)
    assert found["left_s"] == 89 * 2.0 and found["data_wait"] == 0.25
    write_metrics(run_dir, [first])
    assert status(run_dir)[0]["left_s"] == 99 * 50.0


def test_a_run_that_ended_on_this_machine_is_not_thought_elsewhere(run_dir):
    (run_dir / ".lock").write_text(socket.gethostname())
    assert status(run_dir)[0]["state"] == "not running"
    (run_dir / ".lock").write_text("another-machine")
    assert status(run_dir)[0]["state"] == "unknown"


def test_anomalies(run_dir):
    write_metrics(run_dir, [LINES[0] | {"anomalies": 2}])
    (run_dir / "anomalies").mkdir()
    for step in (3, 7):
        report = {"kind": "spike", "policy": "skip", "step": step, "position": step, "loss": 9.0, "ranks": []}
        (run_dir / "anomalies" / f"step-{step:08d}.json").write_text(json.dumps(report))
    last = {"step": 7, "kind": "spike", "policy": "skip"}
    assert status(run_dir)[0]["anomalies"] == {"left_out": 2, "limit": 10, "reports": 2, "last": last}
    (run_dir / "anomalies" / "step-00000009.json").write_text('{"kind')
    assert "2 of at most 10 left out, 3 reports" in shown(run_dir)


def test_checkpoints_as_training_writes_them(run_dir):
    write_recipe(run_dir, "schedule.duration.epochs=2")
    assert status(run_dir)[0]["total_steps"] is None  # nothing tells how many samples there are
    root = run_dir / "checkpoints"
    save_checkpoint(root, 10)
    save_checkpoint(root, 20)
    (root / "step-00000030").mkdir()  # without an index, so none
    now = time.time()
    os.utime(root / "step-00000020" / "index.json", (now - 100, now - 100))
    (found,) = status(run_dir)
    rank_file = root / "step-00000020" / "rank-00000.safetensors"
    expected = {"where": str(root), "count": 2, "step": 20, "bytes": rank_file.stat().st_size}
    assert {key: found["checkpoints"][key] for key in expected} == expected
    assert 100 <= found["checkpoints"]["age_s"] < 200
    assert found["total_steps"] == 100  # two epochs of 50 batches
    os.truncate(rank_file, 100)
    (root / "step-00000020" / "index.json").touch()
    assert "100 bytes, expected" in status(run_dir)[0]["notes"][0]
    (root / "step-00000020" / "index.json").write_text("{")
    (found,) = status(run_dir)
    assert (found["checkpoints"]["step"], found["checkpoints"]["bytes"], found["total_steps"]) == (20, None, 100)
    assert "step-00000020/index.json" in found["notes"][0]


def test_the_best_one_by_the_recipes_rule(run_dir):
    """What the run selected itself counts, even where the evaluation is not in the metrics any more."""
    write_recipe(
        run_dir,
        "evaluation.validation=imagenet/validation",
        "evaluation.every.steps=10",
        "selection={metric: validation/loss, mode: min}",
    )
    best = {"step": 10, "metric": "validation/loss", "value": 1.0, "is_kept": False}
    assert status(run_dir)[0]["best"] == best
    save_checkpoint(run_dir / "checkpoints", 20, selection={"best": 0.25, "best_step": 5, "evaluated": 20})
    assert status(run_dir)[0]["best"] == best | {"step": 5, "value": 0.25}
    save_checkpoint(run_dir / "checkpoints", 30, selection={"best": 0.2, "best_step": 30, "evaluated": 30})
    assert status(run_dir)[0]["best"] == best | {"step": 30, "value": 0.2, "is_kept": True}


def test_checkpoints_at_a_url_are_not_asked_for(run_dir):
    write_recipe(run_dir, "checkpoint.dir=https://me:secret@192.0.2.1/runs?sign=secret")  # an address without a host
    text = shown(run_dir)
    assert "at https://192.0.2.1/runs" in text and "which is not asked" in text and "secret" not in text


# Each empties the run's folder, but for the last.
NO_RUNS: dict[str, tuple[Callable[[Path], object], int]] = {
    "rmtree": (lambda run_dir: None, 2),
    "as_empty": (Path.mkdir, 2),
    "as_file": (Path.touch, 2),
    "without_recipe": (lambda run_dir: (run_dir / "pictures").mkdir(parents=True), 2),
    "with_a_folder_for_metrics": (lambda run_dir: (run_dir / "metrics.jsonl").mkdir(parents=True), 3),
}


@pytest.mark.parametrize("kind", NO_RUNS)
def test_what_is_no_run_is_one_line(run_dir, kind):
    spoil, code = NO_RUNS[kind]
    recipe = (run_dir / "recipe.yaml").read_text()
    shutil.rmtree(run_dir)
    spoil(run_dir)
    if code == 3:
        (run_dir / "recipe.yaml").write_text(recipe)
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == code and len(result.stderr.splitlines()) == 1
    assert_messages("status", {kind: result.stderr.rstrip()}, {run_dir: "RUN"})


def test_a_url_is_no_run():
    result = CliRunner().invoke(app, ["status", "s3://me:secret@bucket/run"])
    assert result.exit_code == 2 and "secret" not in result.stderr
    assert_messages("status", {"URL": result.stderr.rstrip()})


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


LINES_OF_ANYBODY = b'\xff\xfe\n[1]\n{"step": true}\n{"step": 1e400, "step_time_s": 1}\n' + b"[" * 100_000 + b"\n"
LAUNCHES = b'{"event": "started"}\n{"time": 5}\n{"time": "2026-01-01T00:00:00+00:00"}\n{"ti'


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (lambda run_dir: append(run_dir / "recipe.yaml", b"quantum: true\n"), "quantum: unknown key"),
        (lambda run_dir: (run_dir / "recipe.yaml").write_text("a: ["), "recipe.yaml"),
        (lambda run_dir: (run_dir / "recipe.yaml").unlink(), "recipe.yaml"),
        (
            lambda run_dir: append(run_dir / "metrics.jsonl", LINES_OF_ANYBODY),
            "damaged lines of metrics.jsonl left out: 5",
        ),
        (lambda run_dir: append(run_dir / "launch.jsonl", LAUNCHES), "damaged lines of launch.jsonl left out: 2"),
        (lambda run_dir: (run_dir / "checkpoints").touch(), "checkpoints cannot be read: Not a directory"),
    ],
)
def test_what_is_damaged_is_noted_and_the_rest_is_told(run_dir, spoil, note):
    spoil(run_dir)
    (found,) = status(run_dir)
    assert found["step"] == 20 and note in found["notes"][0] and "\n" not in found["notes"][0]
    assert note in shown(run_dir)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run_dir: append(
            run_dir / "launch.jsonl", b'{"event": "restart", "time": "9999-12-31T23:59:59-12:00"}\n'
        ),
        lambda run_dir: append(
            run_dir / "launch.jsonl", b'{"event": "restart", "time": "0001-01-01T00:00:00+12:00"}\n'
        ),
        lambda run_dir: write_metrics(run_dir, [LINES[0] | {"step": 9 * 10**17 + i} for i in range(19)]),
        lambda run_dir: write_metrics(run_dir, [LINES[0] | {"step_time_s": 1e-300, "data_wait_s": 1e17}]),
        lambda run_dir: write_metrics(run_dir, [LINES[0] | {"step": i, "world_size": i} for i in range(1, 60_000)]),
        *(
            lambda run_dir, step=step: write_files(run_dir, ("anomalies/step-1.json", b'{"step": %s}' % step))
            for step in (b"1e999", b"[" * 900 + b"]" * 900, b'"\\u001b[2J"')
        ),
    ],
)
def test_values_that_nobody_measured(run_dir, spoil):
    spoil(run_dir)
    assert status(run_dir)[0]["state"] and "\x1b" not in shown(run_dir) + shown(run_dir, run_dir.parent / "run/.")


def test_before_the_first_step(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    assert "none yet, of 100" in shown(run_dir)
    (run_dir / "metrics.jsonl").touch()
    (found,) = status(run_dir)
    assert (found["step"], found["loss"], found["left_s"]) == (None, None, None)
    (run_dir / "recipe.yaml").unlink()
    assert "not running" in shown(run_dir)


def test_a_run_that_is_removed_while_it_is_read(run_dir):
    save_checkpoint(run_dir / "checkpoints", 20)
    kept, ended = run_dir.parent / "kept", threading.Event()
    shutil.copytree(run_dir, kept)

    def come_and_go() -> None:
        while not ended.is_set():
            shutil.rmtree(run_dir)
            shutil.copytree(kept, run_dir)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    reader = RunReader(str(run_dir))
    answers = set()
    try:
        while len(answers) < 2:
            try:
                answers.add(type(reader.read()))
            except RecipeError:
                answers.add(RecipeError)
    finally:
        ended.set()
        thread.join()


def test_names_that_would_steer_a_terminal(run_dir):
    (run_dir / "launch.jsonl").write_text(
        json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": "restart", "host": "\x1b[31m", "cause": "[red]x"})
        + "\n"
    )
    text = shown(run_dir)
    assert "\x1b" not in text and "[red]x" in text


def test_several_runs_one_of_them_missing(run_dir):
    other = run_dir.parent / "other"
    shutil.copytree(run_dir, other)
    result = CliRunner().invoke(app, ["status", str(run_dir), "/no/such", str(other)])
    assert result.exit_code == 2 and "/no/such" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if "2,048.0" in row] == [str(run_dir), str(other)]
