"""Restart times: of a run's files with known times, and as the input of `vitscale plan`."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitscale.cli.main import app
from vitscale.ground.errors import RecipeError
from vitscale.runs.run import restart_times

# (seconds, restart or step); a step is told when it has ended, and takes 2 s.
HISTORY = [(10, 1), (12, 2), (20, None), (45, 3), (47, 4), (60, None), (61, None), (99, 5), (101, 6), (200, None)]


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(1_700_000_000 + seconds, UTC).isoformat(timespec="milliseconds")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    events, rows = [], []
    for seconds, step in HISTORY:
        if step is None:
            events.append({"time": iso(seconds), "event": "restart", "host": "a", "attempt": len(events) + 1})
        else:
            rows.append({"step": step, "time": iso(seconds), "loss": 1.0, "step_time_s": 2.0, "world_size": 1})
    (tmp_path / "launch.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return tmp_path


def test_from_the_failure_to_the_begin_of_the_next_step(run):
    """Where an attempt has come to no step nothing was restarted; the last one has not come to one yet."""
    assert restart_times(run) == pytest.approx([45 - 2 - 20, 99 - 2 - 61])


def test_a_run_without_restarts_or_files_has_none(run, tmp_path):
    assert restart_times(tmp_path / "nowhere") == []
    (run / "launch.jsonl").unlink()
    assert restart_times(run) == []


def plan(*arguments: object):
    small = ["--set", "model.depth=2", "--set", "batch.global=64"]
    command = ["plan", "h14_jft", "--devices", "16", "--hardware", "h100", *small, "--json", *map(str, arguments)]
    return CliRunner().invoke(app, command)


def test_the_plan_takes_their_median(run):
    measured = json.loads(plan("--mtbf", 500, "--restart-of", run).output)
    by_hand = json.loads(plan("--mtbf", 500, "--restart", (23 + 36) / 2).output)
    assert measured["goodput"] == by_hand["goodput"]
    assert any("29.5 s" in line and "2 restarts" in line for line in measured["assumptions"])


@pytest.mark.parametrize("arguments", [[], ["--mtbf", 500, "--restart", 20]])
def test_mistakes_are_told(run, tmp_path, arguments):
    result = plan("--restart-of", run, *arguments)
    assert isinstance(result.exception, RecipeError) and "--restart-of" in str(result.exception)
    result = plan("--restart-of", tmp_path / "nowhere", "--mtbf", 500)
    assert isinstance(result.exception, RecipeError) and "nowhere" in str(result.exception)
