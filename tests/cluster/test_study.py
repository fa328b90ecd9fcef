"""A study as array jobs of a real Slurm: watched, left alone, and watched again."""

import json
import subprocess
import sys

import pytest
from slurm_cluster import ROOT, SlurmCluster, wait_until
from studies.tiny import SPLITS, write_study

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import RecipeError
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job
from vitscale.launch.clusters.slurm import render_array


def test_each_index_of_an_array_is_one_launch(tmp_path):
    jobs = [Job(Pretraining("b16_jft", run_dir=tmp_path / name, settings=("seed=3",))) for name in ("a b", "c")]
    script = render_array(jobs, "study", tmp_path, "launch.log", at_once=1)
    assert "#SBATCH --array=0-1%1\n" in script
    chooses = script.partition("exec >>")[0] + 'printf \'<%s>\' "$run_dir" "$@"\n'
    for index, job in enumerate(jobs):
        said = subprocess.run(
            ["bash"], input=chooses, env={"SLURM_ARRAY_TASK_ID": str(index)}, capture_output=True, text=True
        )
        assert said.stdout.startswith(f"<{job.what.run_dir}><{sys.executable}><-m><vitscale><launch><b16_jft>"), said
        assert f"<--run-dir><{job.what.run_dir}><--set><seed=3>" in said.stdout


def study(slurm: SlurmCluster, folder, *arguments: str) -> subprocess.Popen[str]:
    environment = {**slurm.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitscale", "study", "study.yaml", "--dir", "out", "--engine", "slurm", *arguments]
    return subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.cluster
def test_jobs_outlive_the_process_that_watches_them(slurm, tmp_path):
    for seed, split in enumerate(SPLITS):
        write_generated_dataset(tmp_path / "data" / "colours" / split, [48], seed=seed)
    part = {
        "settings": {"data.root": str(tmp_path / "data")},
        "grid": [{"optimizer.lr": [0.001, 0.3]}],
        "datasets": {"colours": SPLITS},
        "selection": {"metric": "dev/loss", "mode": "min"},
        "refit": {"seeds": [0]},
    }
    write_study(tmp_path, {"a": part})
    jobs_file = tmp_path / "out" / "slurm-jobs.json"
    with study(slurm, tmp_path) as process:
        wait_until(jobs_file.exists, 120)
        process.kill()
    jobs = json.loads(jobs_file.read_text())
    assert set(jobs) == {"a-colours-lr0.001", "a-colours-lr0.3"}

    with study(slurm, tmp_path) as process:
        said = process.stderr.read()
    assert process.returncode == 0, said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {entry["state"] for entry in results["entries"]} == {"done"}
    arrays = {path.name.removeprefix("slurm-").partition("_")[0] for path in (tmp_path / "out").glob("slurm-*_*.out")}
    assert len(arrays) == 2, "one for the candidates, handed in once, and one for the winner"
    assert (tmp_path / "out" / "a-colours-full-seed0" / "launch.log").stat().st_size > 0


@pytest.mark.cluster
def test_an_option_that_sbatch_does_not_know(slurm, tmp_path):
    write_study(tmp_path, {"a": {}})
    with study(slurm, tmp_path, "--no-check", "--engine-option", "partitiom=main") as process:
        said = process.stderr.read()
    assert process.returncode == RecipeError.exit_code and "partitiom" in said
