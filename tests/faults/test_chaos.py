"""The chaos program for some minutes, with several seeds and sizes; `make chaos` runs it for longer."""

import json
import subprocess
import sys
from pathlib import Path

import chaos
import pytest


def run_chaos(out: Path, *options: str) -> dict:
    """Its report."""
    command = [sys.executable, chaos.__file__, "--out", str(out / "chaos"), "--json", *options]
    outcome = subprocess.run(command, capture_output=True, text=True)
    print(outcome.stdout, outcome.stderr)
    report = json.loads(outcome.stdout)
    assert report["problems"] == [] and outcome.returncode == 0
    return report


def check_all_kinds(report: dict) -> None:
    injected = {kind: row["injected"] for kind, row in report["faults"].items()}
    if not report["fills_disk"]:
        injected.pop("fill disk")
    assert min(injected.values()) > 0, injected


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "seed"), [(1, 2), (2, 3), (4, 4)])
def test_minutes_of_faults_change_nothing(tmp_path, ranks, seed):
    check_all_kinds(run_chaos(tmp_path, "--minutes", "3", "--ranks", str(ranks), "--seed", str(seed)))
