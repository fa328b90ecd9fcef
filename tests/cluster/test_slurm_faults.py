"""Runs over two nodes of a real Slurm that meet faults, compared to the last bit with runs that did not."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from faults.watched_runs import LONG, Run, assert_same, launch, write_data, write_recipe
from slurm_cluster import NODES, ROOT, SlurmCluster, output, submit, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, BEFORE = 200, 15
URGENT = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
URGENT.append("--wrap=sleep 3")
CPUS = sorted(os.sched_getaffinity(0))[:2]
# In the command lines of ranks and of launches.
RANK, RANK_AS_TASK, LAUNCH = str(ROOT / "vitscale" / "pretrain.py"), "vitscale.pretrain", "launch"


class Training:
    """The small recipe under one ZeRO stage: a run without Slurm, and runs on it that have to be the same.

    All ranks have one thread, as the number of threads is seen in the last bits: each has a processor for itself.
    """

    def __init__(self, folder: Path, stage: int) -> None:
        self.folder = folder
        write_data(folder)
        schedule = {"duration": {"steps": STEPS}, "warmup": {"steps": 10}}
        blocks = {"schedule": schedule, "checkpoint": {"every": {"steps": 10}}, "parallelism": {"zero_stage": stage}}
        self.recipe = write_recipe(folder / "recipe.yaml", folder, **blocks)
        self.undisturbed = Run(self.recipe, folder / "undisturbed")
        command = ["taskset", "--cpu-list", f"{CPUS[0]},{CPUS[-1]}", *launch(self.undisturbed)]
        assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
        self.python = folder / "python"
        self.python.write_text(
            f"#!/bin/bash\nown=({CPUS[0]} {CPUS[-1]})\n"
            f'exec taskset --cpu-list "${{own[SLURM_NODEID]}}" {sys.executable} "$@"\n'
        )
        self.python.chmod(0o755)

    def submit(self, slurm: SlurmCluster, name: str, *options: str) -> tuple[Run, str]:
        """A run and its job, which has both nodes for itself."""
        run = Run(self.recipe, self.folder / name)
        arguments = [str(self.recipe), "--run-dir", str(run.dir), "--ranks", "1"]
        for option in ("exclusive=", f"python={self.python}"):
            arguments += ["--cluster-option", option]
        return run, submit(slurm, self.folder, *arguments, *options)

    def finish(self, slurm: SlurmCluster, run: Run, number: str) -> dict[str, str]:
        """See that the job ends well, and the run as if nothing had happened: what Slurm says of the job."""
        job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=600)
        print(output(run.dir, number))
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0")
        assert_same(run, self.undisturbed)
        return job


@pytest.fixture(scope="module")
def zero_1(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("zero-1"), stage=1)


@pytest.fixture(scope="module")
def zero_3(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("zero-3"), stage=3)


def wait_for_step(run: Run, step: int, number: str) -> None:
    wait_until(lambda: run.step() >= step or run.is_done(), 300, lambda: output(run.dir, number))
    assert not run.is_done(), "too late"


def process_of(number: str, node: str, word: str) -> psutil.Process:
    """The one of a job on a node that has the word in its command line."""
    for process in psutil.process_iter():
        try:
            found = process.environ()
            here = (found.get("SLURM_JOB_ID"), found.get("SLURMD_NODENAME")) == (number, node)
            if here and "SLURM_PROCID" in found and word in process.cmdline():
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no {word} of job {number} on {node}")


def attempts(run: Run) -> int:
    return len(run.events("started")) // len(NODES)


def exit_codes(run: Run) -> list[int]:
    """Of the launches that could say how they ended."""
    return [event["exit_code"] for event in run.events("finished")]


def test_a_killed_rank_is_started_again_in_the_same_job(slurm, zero_1):
    run, number = zero_1.submit(slurm, "killed-rank")
    wait_for_step(run, BEFORE, number)
    process_of(number, NODES[1], RANK).kill()
    job = zero_1.finish(slurm, run, number)
    assert job["Restarts"] == "0" and attempts(run) == 2


def test_a_killed_launch_makes_the_job_requeue_itself(slurm, zero_1):
    run, number = zero_1.submit(slurm, "killed-launch")
    wait_for_step(run, BEFORE, number)
    process_of(number, NODES[1], LAUNCH).kill()
    job = zero_1.finish(slurm, run, number)
    assert job["Restarts"] == "1" and "slurm: exit code 137 after step" in output(run.dir, number)


def test_a_killed_rank_that_is_a_task_makes_the_job_requeue_itself(slurm, zero_3):
    run, number = zero_3.submit(slurm, "killed-task", "--cluster-option", "tasks=rank")
    wait_for_step(run, BEFORE, number)
    process_of(number, NODES[0], RANK_AS_TASK).kill()
    job = zero_3.finish(slurm, run, number)
    assert job["Restarts"] == "1" and run.events("started") == []


def test_a_node_that_fails_is_replaced(slurm, zero_3):
    """By itself, here, once it is there again."""
    run, number = zero_3.submit(slurm, "failed-node")
    wait_for_step(run, BEFORE, number)
    slurm.kill_node(NODES[1])
    slurm.wait_for(number, "PENDING", seconds=120)
    assert "down" in " ".join(slurm.node_states())
    slurm.start_node(NODES[1])
    job = zero_3.finish(slurm, run, number)
    assert job["Restarts"] == "1" and attempts(run) == 2


def preempt(slurm: SlurmCluster, training: Training, run: Run, number: str) -> None:
    wait_for_step(run, BEFORE, number)
    urgent = slurm.ask(*URGENT)
    slurm.wait_for(urgent, "RUNNING", "COMPLETED", seconds=120)
    assert exit_codes(run) == [85, 85]
    job = training.finish(slurm, run, number)
    assert job["Restarts"] == "1" and attempts(run) == 2


def test_a_preempted_run_saves_within_the_grace_time_and_goes_on(slurm, zero_1):
    preempt(slurm, zero_1, *zero_1.submit(slurm, "preempted"))


def test_a_preempted_run_saves_without_a_grace_time_and_goes_on(slurm, zero_3):
    slurm.ask("scontrol", "update", "PartitionName=main", "GraceTime=0")
    try:
        preempt(slurm, zero_3, *zero_3.submit(slurm, "preempted-at-once"))
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "GraceTime=60")


def test_a_cancelled_run_saves_and_another_job_goes_on(slurm, zero_3):
    run, number = zero_3.submit(slurm, "cancelled")
    wait_for_step(run, BEFORE, number)
    slurm.ask("scancel", number)
    job = slurm.wait_for(number, "CANCELLED", seconds=120)
    assert job["Restarts"] == "0" and exit_codes(run) == [85, 85]
    assert run.saved()[-1] == run.step()
    run, number = zero_3.submit(slurm, "cancelled")
    zero_3.finish(slurm, run, number)


def test_before_the_time_is_up_a_run_saves_and_is_requeued(slurm, zero_1, tmp_path):
    run = Run(write_recipe(tmp_path / "recipe.yaml", zero_1.folder, **LONG), tmp_path / "run")
    limit = ["--time-limit", "3", "--cluster-option", "signal=TERM@60"]
    number = submit(slurm, tmp_path, str(run.recipe), "--run-dir", str(run.dir), "--ranks", "1", *limit)
    slurm.wait_for(number, "RUNNING", seconds=60)
    slurm.wait_for(number, "PENDING", seconds=240)
    assert exit_codes(run) == [85, 85]
    saved = run.saved()[-1]
    assert saved == run.step() > 0
    wait_for_step(run, saved + 1, number)
    assert slurm.job(number)["Restarts"] == "1" and run.events("started")[-1]["checkpoint"] == saved


def test_a_run_that_is_told_to_move_is_requeued(slurm, zero_1):
    run, number = zero_1.submit(slurm, "moved")
    wait_for_step(run, BEFORE, number)
    slurm.ask("scancel", "--signal=USR1", number)
    wait_until(lambda: attempts(run) == 2, 120, lambda: output(run.dir, number))
    wait_for_step(run, run.step() + BEFORE, number)
    slurm.ask("scontrol", "requeue", number)
    job = zero_1.finish(slurm, run, number)
    assert job["Restarts"] == "2" and exit_codes(run) == [85, 85, 85, 85, 0, 0]


def test_data_that_are_missing_end_a_job_for_good(slurm, zero_1):
    hidden = zero_1.folder / "hidden"
    (zero_1.folder / "train").rename(hidden)
    try:
        run, number = zero_1.submit(slurm, "without-data")
        job = slurm.wait_for(number, "FAILED", seconds=120)
    finally:
        hidden.rename(zero_1.folder / "train")
    assert (job["ExitCode"], job["Restarts"]) == ("3:0", "0"), output(run.dir, number)
