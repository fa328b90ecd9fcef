"""The ranks of a recipe: how many, with which arguments, and on a real run one of which is killed."""

import errno
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import is_alive, started, wait_until

import vitscale
from vitscale.ground.errors import PeerLostError, PreemptedError, RecipeError
from vitscale.ground.machine import hold_port
from vitscale.launch import Pretraining, PretrainingRanks
from vitscale.runs.names import default_run_dir

VITSCALE = [sys.executable, "-c", "from vitscale.cli.entry import vitscale; vitscale()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(vitscale.__file__).parents[1])}


def sizes(counts: list[int | None], **options) -> list[int]:
    """Ranks of one attempt after another, while this many devices are there."""
    left = iter(counts)
    ranks = PretrainingRanks(Pretraining("h14_jft", **options), lambda: next(left))  # batch.global 4096
    found = []
    for attempt in range(len(counts)):
        commands = ranks(attempt)
        assert {command.environment["WORLD_SIZE"] for command in commands} == {str(len(commands))}
        assert [command.environment["RANK"] for command in commands] == [str(i) for i in range(len(commands))]
        found.append(len(commands))
    return found


def test_as_many_ranks_as_devices_that_divide_the_batch(capfd):
    assert sizes([8, 7, 3, 1], run_dir=Path("anywhere")) == [8, 4, 2, 1]
    shown = capfd.readouterr().err
    assert "7 CUDA devices instead of 8" in shown and "uses 4 of 7 CUDA devices" in shown
    assert sizes([0, 0]) == [1, 1]  # on CPUs


def test_what_is_refused_leaves_no_directory_and_its_cause_is_told_once(tmp_path):
    run_dir = tmp_path / "runs" / "refused"
    command = [*VITSCALE, "launch", "h14_jft", "--ranks", "1", "--run-dir", str(run_dir)]
    command += ["--set", f"data.root={tmp_path}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (2, 3), done.stderr
    assert not run_dir.parent.exists()
    lines = done.stderr.splitlines()
    assert sum("rank 0" in line for line in lines) == sum(line.startswith("error: ") for line in lines) == 1, lines


def test_ranks_that_are_asked_for_are_not_counted():
    ranks = PretrainingRanks(Pretraining("h14_jft", ranks=3), lambda: pytest.fail("counted"))
    assert len(ranks(0)) == len(ranks(1)) == 3


def test_devices_that_cannot_be_counted():
    with pytest.raises(RecipeError, match="--ranks"):
        sizes([None])
    assert sizes([4, None, 2]) == [4, 4, 2]
    with pytest.raises(PeerLostError, match=r"\b4\b"):
        sizes([4, 0])


def arguments(ranks: PretrainingRanks, attempt: int) -> list[str]:
    return list(ranks(attempt)[0].command[2:])


@pytest.mark.parametrize("held_a_run", [False, True])
def test_a_restart_continues_only_what_this_launch_began(tmp_path, held_a_run):
    if held_a_run:
        (tmp_path / "recipe.yaml").touch()
    ranks = PretrainingRanks(Pretraining("h14_jft", run_dir=tmp_path, ranks=1, resume="never"))
    (tmp_path / "recipe.yaml").touch()
    assert "never" in arguments(ranks, 0)
    assert ("never" in arguments(ranks, 1)) == held_a_run


def test_the_time_limit_is_that_of_all_attempts_together(monkeypatch):
    ranks = PretrainingRanks(Pretraining("h14_jft", ranks=1, time_limit_minutes=10))
    assert float(arguments(ranks, 0)[-1]) == pytest.approx(10, abs=0.1)
    ranks._began -= 8 * 60
    assert float(arguments(ranks, 1)[-1]) == pytest.approx(2, abs=0.1)
    ranks._began -= 2 * 60
    with pytest.raises(PreemptedError, match="10 minutes"):
        arguments(ranks, 2)


def test_the_default_run_directory(tmp_path):
    assert PretrainingRanks(Pretraining("h14_jft", ranks=1)).run_dir == Path("runs/h14_jft")
    assert PretrainingRanks(Pretraining("h14_jft", ranks=1, smoke=True)).run_dir == Path("runs/h14_jft-smoke")
    above = tmp_path / "...yaml"  # whose stem is ..
    above.write_text("extends: h14_jft.yaml\n")
    with pytest.raises(RecipeError, match="--run-dir"):
        default_run_dir(str(above), smoke=False)


def test_a_held_port_is_for_the_ranks_alone():
    """Where one of them listens, as torch does it; nobody else gets it meanwhile."""
    with hold_port() as holder, socket.socket() as stranger, socket.socket() as rank:
        port = holder.getsockname()[1]
        with pytest.raises(OSError) as refusal:
            stranger.bind(("127.0.0.1", port))
        assert refusal.value.errno == errno.EADDRINUSE
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", port))
        rank.listen()


def _ranks_of(launch: psutil.Process) -> dict[str, int]:
    """Rank -> process."""
    found = {}
    for child in launch.children():
        try:
            found[child.environ().get("RANK", "guard")] = child.pid
        except psutil.Error:  # it has just ended
            continue
    return found


def test_a_run_of_which_a_rank_is_killed_comes_to_its_end(tmp_path):
    run_dir, steps = tmp_path / "run", 40
    # From step 9 on there is the checkpoint of step 4: that of step 8 waits for it.
    at, rank = random.randint(9, steps - 15), random.choice("01")
    print(f"rank {rank} is killed after step {at}")
    settings = [f"schedule.duration.steps={steps}", "checkpoint.every.steps=4", "logging.tensorboard=false"]
    command = [*VITSCALE, "launch", "b16_jft", "--smoke", "--ranks", "2", "--run-dir", str(run_dir)]
    for setting in settings:
        command += ["--set", setting]

    def last_step() -> int:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    with started(command, env=ENVIRONMENT, stderr=subprocess.PIPE, umask=0) as process:
        wait_until(lambda: last_step() >= at or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()[1]
        victims = _ranks_of(psutil.Process(process.pid))
        os.kill(victims[rank], signal.SIGKILL)
        shown = process.communicate(timeout=240)[1]
    print(shown)
    assert process.returncode == 0 and (run_dir / "DONE").exists()
    assert f"launch: rank {rank} (pid {victims[rank]}) was killed by SIGKILL" in shown
    assert not any(is_alive(pid) for pid in victims.values())
    assert not [path for path in (run_dir, *run_dir.rglob("*")) if path.stat().st_mode & stat.S_IWOTH]
    events = [json.loads(line) for line in (run_dir / "launch.jsonl").read_text().splitlines()]
    begun_at = [event["checkpoint"] for event in events if event["event"] == "started"]
    assert begun_at[0] == 0 and len(begun_at) == 2 and begun_at[1] >= 4
    trained = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in trained if "loss" in line] == list(range(1, steps + 1))
