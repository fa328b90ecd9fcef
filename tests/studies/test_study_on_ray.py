"""A study on a real Ray cluster of this machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until
from studies.tiny import write_study

from vitscale.data.shards.generated import write_generated_dataset

ROOT = Path(__file__).resolve().parents[2]
HAS_RAY = subprocess.run([sys.executable, "-c", "import ray"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")


def study(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "vitscale", "study", "study.yaml", "--dir", "out", "--engine", "ray", *arguments]
    environment |= {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_entries_run_side_by_side_are_told_to_end_and_go_on(tmp_path):
    write_generated_dataset(tmp_path / "data" / "train", [64])
    settings = {"data.root": str(tmp_path / "data"), "schedule.duration.steps": 600, "logging.every": 1}
    write_study(tmp_path, {"a": {"settings": settings, "seeds": [0, 1]}})
    runs = [tmp_path / "out" / f"a-seed{seed}" for seed in (0, 1)]
    with study(tmp_path, "--slots", "2") as process:
        begun = [run / "metrics.jsonl" for run in runs]
        wait_until(lambda: all(path.exists() for path in begun) or process.poll() is not None, 300)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 85, said
    assert not any((run / "DONE").exists() for run in runs)
    assert all(list((run / "checkpoints").glob("step-*/index.json")) for run in runs)

    with study(tmp_path, "--slots", "2") as process:
        said = process.stderr.read()
    assert process.returncode == 0, said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [entry["state"] for entry in results["entries"]] == ["done", "done"]
    assert all("resumed from" in (run / "launch.log").read_text() for run in runs)


@pytest.mark.slow  # a cluster has to begin for it
def test_what_no_cluster_can_give_is_refused(tmp_path):
    write_study(tmp_path, {"a": {}})
    with study(tmp_path, "--no-check", "--engine-option", "gpus=1000000") as process:
        said = process.stderr.read()
    assert process.returncode == 2 and "gpus=1000000" in said
