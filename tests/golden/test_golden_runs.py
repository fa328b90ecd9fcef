"""Run directories that earlier versions left: every later version resumes, verifies and reports them.

Each folder here has a recipe, its data, a `run` that was stopped at its middle, and in expected.jsonl the lines of
metrics of a run that was not stopped, by the version that made it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNS = sorted(path.parent.name for path in HERE.glob("*/expected.jsonl"))


def vitscale(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "vitscale", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on_and_is_verified_and_reported(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(HERE / name, folder)
    vitscale("launch", "--ranks", "1", "--run-dir", "run", "recipe.yaml", folder=folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (folder / "expected.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, expected[-1]["step"] + 1))
    page = (HERE.parents[1] / "docs" / "operations.md").read_text()
    assert {key for line in lines for key in line if "/" not in key} <= set(re.findall(r"`(\w+)`", page))
    for line, wanted in zip(lines[-len(expected) :], expected, strict=True):
        assert line["batch_digest"] == wanted["batch_digest"] and line["lr"] == wanted["lr"]
        for key in ("loss", "grad_norm"):  # processors round otherwise
            assert line[key] == pytest.approx(wanted[key], rel=1e-5)
    assert vitscale("verify", "run", folder=folder)
    vitscale("report", "run", "--out", "report", folder=folder)
    results = json.loads((folder / "report" / "results.json").read_text())
    assert str(expected[-1]["step"]) in json.dumps(results)
