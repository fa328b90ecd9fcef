"""`vitscale status`: against figures by hand, locks of real processes, and journals of real launches."""

import fcntl
import json
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from vitscale.checkpoint import CheckpointIndex, CheckpointStore, Fragment
from vitscale.cli.main import app
from vitscale.errors import RecipeError
from vitscale.launch import Launch, RankCommand, Supervisor
from vitscale.recipe import load_recipe
from vitscale.runs.launches import Event, read_launches
from vitscale.status import RunReader
from vitscale.status.liveness import Signs, duration, judge

# What the entry point does, and a word on stderr where torch came along.
COMMAND = """
import sys
from vitscale.cli.main import main
try:
    main()
finally:
    if "torch" in sys.modules:
        print("torch was imported", file=sys.stderr)
"""
NOW = 1_700_000_000.0

# Steps 1 to 10 took 2 s each on 4 devices, 11 to 20 took 3 s each on 8.
LINE = {"loss": 2.0, "lr": 1e-3, "images_per_s": 2048.0, "data_wait": 0.5, "peak_memory_bytes": 5e9}
LINES = [
    {"step": 10, **LINE, "step_time_s": 2.0, "world_size": 4, "exaflops": 0.1},
    {"step": 10, "eval/validation/top1": 0.75, "eval/validation/loss": 1.0},
    {"step": 20, **LINE, "step_time_s": 3.0, "world_size": 8, "exaflops": 0.2},
    {"step": 20, "eval/validation/top1": 0.5, "eval/validation/loss": None},
]


def status(*arguments: str | Path) -> list[dict]:
    """The objects that --json prints."""
    result = CliRunner().invoke(app, ["status", "--json", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def shown(*arguments: str | Path) -> str:
    """What people see."""
    result = CliRunner().invoke(app, ["status", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def write_metrics(run_dir: Path, lines: list[dict]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of ViT-B/16, 20 of 100 steps done."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_recipe(run_dir)
    write_metrics(run_dir, LINES)
    return run_dir


def write_recipe(run_dir: Path, *settings: str) -> None:
    of_run = [
        "precision=bf16",
        "model.num_classes=1000",
        "model.head=linear",
        "schedule.duration.steps=100",
        "logging.every=10",
    ]
    recipe = load_recipe(
        "b16_jft", ["precision=bf16", *of_run, "evaluation.fewshot=null", "evaluation.every=null", *settings]
    )
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe.dump()))


def save_checkpoint(root: Path, step: int, **more) -> None:
    """A checkpoint by the store that training uses."""
    data = {"num_samples": 4096 * 50, "class_names": ["a", "b"]}
    index = CheckpointIndex(step, 1, {"w": [1000]}, ["master"], step, {}, data, {}, **more)
    CheckpointStore(root).save(index, [Fragment("w", 0, {"master": torch.zeros(1000)})])


# ---- Figures ---------------------------------------------------------------------------------------------------------


def test_figures_by_hand(run_dir):
    (found,) = status(run_dir, "--hardware", "h100", "--price", "2.5")
    assert (found["step"], found["total_steps"], found["world_size"]) == (20, 100, 8)
    assert (found["loss"], found["lr"], found["images_per_s"], found["exaflops"]) == (2.0, 1e-3, 2048.0, 0.2)
    assert found["left_s"] == 80 * 3.0  # at the pace of the last lines on as many devices
    assert found["data_wait"] == pytest.approx((0.5 + 0.5) / (2 + 3))
    device_hours = (10 * 2.0 * 4 + 10 * 3.0 * 8) / 3600
    assert found["hours"] == pytest.approx((20 + 30) / 3600)
    assert found["device_hours"] == pytest.approx(device_hours)
    assert found["energy_kwh"] == pytest.approx(device_hours * 0.7)  # an H100 SXM draws 700 W at most
    assert found["cost"] == pytest.approx(device_hours * 2.5)
    # ViT-B/16 has 17.56 GMACs on 224 x 224; training is three passes of two FLOPs each.
    assert found["mfu"] == pytest.approx(6 * 17.56e9 * 2048 / (8 * 989.4e12), rel=0.01)
    assert found["evaluation"] == {"step": 20, "values": {"validation/top1": 0.5, "validation/loss": None}}
    assert found["best"] == {"step": 10, "metric": "validation/top1", "value": 0.75, "is_kept": False}
    assert not found["is_estimated"] and found["trend"] is None and found["notes"] == []


def test_what_people_see(run_dir):
    save_checkpoint(run_dir / "checkpoints", 20)
    text = shown(run_dir, "--price", "1")
    assert "20 of 100 (20.0 %, 4 min 0 s left)" in text
    assert "2,048.0 images/s, 3 s a step, 8 device(s)" in text
    assert "5 GB at most" in text and "price 0.09" in text
    assert "validation/loss not finite" in text and "step 10: validation/top1 0.7500" in text


def test_mfu_of_the_metrics_goes_first(run_dir):
    write_metrics(run_dir, [LINES[0] | {"mfu": 0.4}])
    assert status(run_dir, "--hardware", "h100")[0]["mfu"] == 0.4


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


def test_a_loss_that_is_not_finite(run_dir):
    write_metrics(run_dir, [LINES[0] | {"loss": None}])
    assert "not finite" in shown(run_dir)


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


def test_runs_can_be_compared(run_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    write_recipe(other, "precision=fp32")
    header, _, one, two = shown(run_dir, other).splitlines()[:4]
    assert "top-1" in header and "loss" in header
    assert "50.0 %" in one and "bf16" in one and "fp32" in two


def test_anomalies(run_dir):
    write_metrics(run_dir, [LINES[0] | {"anomalies": 2}])
    (run_dir / "anomalies").mkdir()
    for step in (3, 7):
        report = {"kind": "spike", "policy": "skip", "step": step, "position": step, "loss": 9.0, "ranks": []}
        (run_dir / "anomalies" / f"step-{step:08d}.json").write_text(json.dumps(report))
    last = {"step": 7, "kind": "spike", "policy": "skip"}
    assert status(run_dir)[0]["anomalies"] == {"left_out": 2, "limit": 10, "reports": 2, "last": last}
    (run_dir / "anomalies" / "step-00000009.json").write_text('{"kind')
    assert "2 of at most 10 left out, 3 report(s)" in shown(run_dir)


# ---- Metrics that grow -----------------------------------------------------------------------------------------------


def test_only_whole_lines_count_and_new_ones_are_added(run_dir):
    reader = RunReader(str(run_dir))
    path = run_dir / "metrics.jsonl"
    before = reader.read()
    text = json.dumps(LINES[2] | {"step": 30})
    with path.open("a") as file:
        file.write(text[:50])
    torn = reader.read()
    assert (torn.step, torn.hours, torn.notes) == (20, before.hours, [])
    with path.open("a") as file:
        file.write(text[50:] + "\n")
    after = reader.read()
    assert after.step == 30 and after.hours == pytest.approx((20 + 30 + 30) / 3600)


def test_a_run_that_resumes_begins_its_file_again(run_dir):
    reader = RunReader(str(run_dir))
    reader.read()
    aside = run_dir / "aside"
    aside.write_text(json.dumps(LINES[0]) + "\n" + "".join(json.dumps(LINES[2]) + "\n" for _ in range(10)))
    aside.replace(run_dir / "metrics.jsonl")
    now = reader.read()
    assert (now.step, now.evaluation) == (20, None) and now.hours == pytest.approx(50 / 3600)
    assert now.notes == ["damaged lines of metrics.jsonl left out: 9"]


def test_a_large_file_is_read_in_part(run_dir):
    """The figures of the end are exact, sums are near, and the process has read a small part."""
    random.seed(0)
    seconds = device_seconds = 0.0
    filler = "x" * 200
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 120_001):
            world, pace = (64, 1.0) if step < 70_000 else (128, 0.4)
            took = pace * random.lognormvariate(0, 0.2)
            seconds, device_seconds = seconds + took, device_seconds + took * world
            file.write(
                f'{{"step": {step}, "loss": 1.0, "step_time_s": {took}, "world_size": {world}, "x": "{filler}"}}\n'
            )
        file.write('{"step": 120000, "eval/validation/top1": 0.9}\n')
        size = file.tell()
    reader = RunReader(str(run_dir))
    before = read_so_far()
    found = reader.read()
    assert read_so_far() - before < size / 4
    assert found.step == 120_000 and found.step_time_s == took and found.is_estimated
    assert found.hours == pytest.approx(seconds / 3600, rel=0.02)
    assert found.device_hours == pytest.approx(device_seconds / 3600, rel=0.02)
    assert found.best is not None and found.best.value == 0.9 and "is large" in found.notes[0]
    before = read_so_far()
    reader.read()
    assert read_so_far() - before < 1e6


def read_so_far() -> int:
    """Bytes that this process has asked files for."""
    return int(Path("/proc/self/io").read_text().split()[1])


# ---- Whether it is alive ---------------------------------------------------------------------------------------------


def test_the_lock_of_a_live_process_is_seen_and_left_alone(run_dir):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held'); input()"
    path = run_dir / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-u", "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.utime(run_dir / "metrics.jsonl", (NOW, NOW))
        assert status(run_dir)[0]["state"] == "running"
    finally:
        holder.kill()
        holder.communicate()
    (found,) = status(run_dir)
    assert found["state"] == "not running" and "one is due every 30 s" in found["why"]
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("body", "state", "why"),
    [
        ("sys.exit(4)", "failed", "exit code 4: rank 0"),
        ("sys.exit(85)", "preempted", "told to end"),
        ("pass", "stopped", "stopped early, as asked"),
    ],
)
def test_what_a_launch_has_told(run_dir, body, state, why):
    os.utime(run_dir / "metrics.jsonl", (NOW, NOW))
    launch(run_dir, body)
    (found,) = status(run_dir)
    assert found["state"] == state and why in found["why"]
    assert found["restarts"] == {"launches": 1, "count": 0, "last": []}


def test_restarts_and_their_causes(run_dir):
    launch(run_dir, "sys.exit(75)")
    launch(run_dir, "os.kill(os.getpid(), signal.SIGKILL)")
    (found,) = status(run_dir)
    assert (found["restarts"]["launches"], found["restarts"]["count"]) == (2, 4)
    assert "exit code 75" in found["restarts"]["last"][0]["cause"]
    assert "was killed by SIGKILL" in found["restarts"]["last"][-1]["cause"]
    assert found["restarts"]["last"][-1]["host"] == socket.gethostname()
    assert "4 in 2 launch(es); the last " in shown(run_dir)


def test_launches_of_several_nodes_are_one(run_dir):
    """Three nodes restart once; a minute later the run is continued on one of them, which is still at it."""
    lines = []
    for attempt, what in ((1, "started"), (1, "rank ended"), (1, "restart"), (2, "started"), (2, "finished")):
        for node in range(3):
            at = f"2026-01-01T00:0{attempt}:0{node}+00:00"
            lines.append({"time": at, "event": what, "host": f"node{node}", "attempt": attempt, "cause": "x"})
    lines.append({"time": "2026-01-01T00:03:00+00:00", "event": "started", "host": "node1", "attempt": 1})
    (run_dir / "launch.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_launches(run_dir / "launch.jsonl")
    assert (found.count, len(found.restarts), found.unfinished_on, found.damaged) == (2, 1, {"node1"}, 0)


def launch(run_dir: Path, body: str) -> None:
    """A real one, of a rank that does nothing else, with two restarts."""
    rank = RankCommand(0, [sys.executable, "-I", "-S", "-c", f"import os, signal, sys; {body}"], {})
    with Supervisor() as supervisor:
        Launch(run_dir, lambda _: [rank], supervisor, max_restarts=2, stops_early=True, first_pause_s=0.01).run()


def event(what: str, ago: float, host: str = "here", **more) -> Event:
    fields = {"attempt": 1, "cause": "", "exit_code": None, "pause_s": 0.0} | more
    return Event(what, NOW - ago, host, **fields)


@pytest.mark.parametrize(
    ("held", "last_event", "line_age", "state"),
    [
        (True, None, None, "running"),
        (True, event("finished", 100, exit_code=85), 5000, "running"),
        (False, event("started", 20), None, "starting"),
        (False, event("started", 20), 5000, "starting"),  # a run that is continued
        (False, event("started", 9000), None, "not running"),
        (False, event("started", 9000), 20, "not running"),  # here, and nobody holds it
        (False, event("started", 9000, "there"), 20, "running"),
        (None, event("started", 9000, "there"), 5000, "not running"),
        (False, event("restart", 20, cause="x", pause_s=60), 30, "restarting"),
        (False, event("restart", 9000, cause="x"), 9000, "not running"),
        (False, event("finished", 20, exit_code=85), 30, "preempted"),
        (False, event("finished", 9000, "there", exit_code=85), 20, "running"),  # trained since then
        (False, None, 20, "unknown"),
        (None, None, 20, "unknown"),
        (False, None, 5000, "not running"),
        (False, None, None, "not running"),
    ],
)
def test_what_the_signs_amount_to(held, last_event, line_age, state):
    line_at = None if line_age is None else NOW - line_age
    is_here = last_event is not None and last_event.host == "here" and last_event.what != "finished"
    assert judge(Signs(held, last_event, is_here, line_at, due_s=50, timeout_s=600), NOW)[0] == state


def test_durations():
    seconds = (0, 0.072, 12, 59.7, 61, 600, 3 * 3600 + 720, 2 * 86400 + 4 * 3600)
    words = ["0 s", "0.072 s", "12 s", "1 min 0 s", "1 min 1 s", "10 min", "3 h 12 min", "2 d 4 h"]
    assert [duration(one) for one in seconds] == words


def test_finished_runs(run_dir):
    done = {"step": 60, "total_steps": 100, "stopped_early": True, "best_step": 10, "evaluation": {}}
    (run_dir / "DONE").write_text(json.dumps(done))
    (found,) = status(run_dir)
    assert (found["state"], found["step"], found["total_steps"], found["left_s"]) == ("stopped early", 60, 100, None)
    (run_dir / "DONE").write_text('{"st')
    (found,) = status(run_dir)
    assert found["state"] not in ("done", "stopped early") and found["step"] == 20
    assert found["notes"] == [f"{run_dir}/DONE is damaged and ignored"]


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


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


# ---- Whatever state a directory is in --------------------------------------------------------------------------------


def as_empty(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    run_dir.mkdir()


def as_file(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    run_dir.touch()


def without_recipe(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    (run_dir / "pictures").mkdir(parents=True)


def with_a_folder_for_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (shutil.rmtree, 2, "there is no such directory"),
        (as_empty, 2, "it is empty"),
        (as_file, 2, "it is a file"),
        (without_recipe, 2, "recipe.yaml"),
        (with_a_folder_for_metrics, 3, "cannot be read (Is a directory)"),
    ],
)
def test_what_is_no_run_is_one_line(run_dir, spoil, code, message):
    spoil(run_dir)
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == code and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_url_is_no_run():
    result = CliRunner().invoke(app, ["status", "s3://me:secret@bucket/run"])
    assert result.exit_code == 2 and "no URL" in result.stderr and "secret" not in result.stderr


def newer_recipe(run_dir: Path) -> None:
    with (run_dir / "recipe.yaml").open("a") as file:
        file.write("quantum: true\n")


def damaged_lines(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"step": true}\n{"step": 1e400, "step_time_s": 1}\n' + b"[" * 100_000 + b"\n")


def damaged_launches(run_dir: Path) -> None:
    (run_dir / "launch.jsonl").write_text(
        '{"event": "started"}\n{"time": 5}\n{"time": "2026-01-01T00:00:00+00:00"}\n{"ti'
    )


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (newer_recipe, "quantum: unknown key"),
        (lambda run_dir: (run_dir / "recipe.yaml").write_text("a: ["), "recipe.yaml"),
        (lambda run_dir: (run_dir / "recipe.yaml").unlink(), "recipe.yaml"),
        (damaged_lines, "damaged lines of metrics.jsonl left out: 5"),
        (damaged_launches, "damaged lines of launch.jsonl left out: 2"),
        (lambda run_dir: (run_dir / "checkpoints").touch(), "checkpoints cannot be read: Not a directory"),
    ],
)
def test_what_is_damaged_is_noted_and_the_rest_is_told(run_dir, spoil, note):
    spoil(run_dir)
    (found,) = status(run_dir)
    assert found["step"] == 20 and note in found["notes"][0] and "\n" not in found["notes"][0]
    assert note in shown(run_dir)


def test_before_the_first_step(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    assert "none yet, of 100" in shown(run_dir)
    (run_dir / "metrics.jsonl").touch()
    (found,) = status(run_dir)
    assert (found["step"], found["loss"], found["left_s"], found["cost"]) == (None, None, None, None)
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
    result = CliRunner().invoke(app, ["status", str(run_dir), "/no/such", str(other), "--price", "1"])
    assert result.exit_code == 2 and "/no/such" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if "2,048.0" in row] == [str(run_dir), str(other)]


def test_prices_that_are_none():
    for price in ("nan", "-1"):
        result = CliRunner().invoke(app, ["status", "x", "--price", price])
        assert result.exit_code == 2 and "Traceback" not in result.output


# ---- The command as a process ----------------------------------------------------------------------------------------


def test_it_starts_without_torch(run_dir):
    command = [sys.executable, "-c", COMMAND, "status", "--hardware", "h100"]
    result = subprocess.run([*command, run_dir], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stderr == ""


def test_watching_without_a_terminal_prints_what_is_new(run_dir):
    command = [sys.executable, "-c", COMMAND, "status", "--watch", run_dir]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 20  of 100" in process.stdout.readline()
        (run_dir / "DONE").write_text(json.dumps({"step": 100, "total_steps": 100}))
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
    (line,) = rest.splitlines()
    assert "done  step 100  of 100" in line


def test_watching_ends_when_nobody_reads_any_more(run_dir):
    line = 'set -o pipefail; "$@" | head -1'
    command = ["bash", "-c", line, "bash", sys.executable, "-c", COMMAND, "status", "--watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "step 20" in process.stdout.readline()
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**LINES[0], "step": 30}) + "\n")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""


def test_ctrl_c_ends_watching(run_dir):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-c", COMMAND, "status", "--watch", run_dir]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables) as process:
        os.close(terminal)
        seen = b""
        while b"checkpoints" not in seen:
            seen += os.read(main_end, 4096)
        process.send_signal(signal.SIGINT)
        while piece := read_or_end(main_end):
            seen += piece
    os.close(main_end)
    assert process.returncode == 130 and b"Traceback" not in seen and b"20 of 100" in seen


def read_or_end(file: int) -> bytes:
    try:
        return os.read(file, 4096)
    except OSError:  # what Linux says when nobody has the terminal open any more
        return b""
