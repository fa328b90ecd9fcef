"""The batch script, and on a real Slurm of two nodes what becomes of it."""

import re
from pathlib import Path

import pytest
from faults.watched_runs import Run
from messages import refusal
from slurm_cluster import output, submit, vitscale

from vitscale.ground.errors import RecipeError
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, find_cluster
from vitscale.recipe import recipes_dir

SMOKE = ("b16_jft", "--smoke")


def render(**fields) -> str:
    what = {name: fields.pop(name) for name in list(fields) if name in Pretraining.__dataclass_fields__}
    return find_cluster("slurm").render(Job(Pretraining("b16_jft", **what), **fields))


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)


def test_options_of_sbatch_come_last_and_replace_ours():
    script = render(nodes=2, options={"signal": "USR1@90", "exclusive": "", "comment": "it's ours"})
    assert directives(script).count("signal=USR1@90") == 1 and "TERM@" not in script
    assert directives(script)[-2:] == ["exclusive", """comment='it'"'"'s ours'"""]


def test_the_time_limit_is_that_of_each_job_and_not_of_the_run():
    script = render(time_limit_minutes=90.5)
    assert "time=91" in directives(script) and "--time-limit" not in script


def test_the_ranks_themselves_as_tasks():
    script = render(nodes=2, ranks=4, stop_at=7, settings=("seed=3",), options={"tasks": "rank", "python": "in box py"})
    assert "ntasks-per-node=4" in directives(script)
    assert "in box py -m vitscale.pretrain --recipe b16_jft" in script and "--set seed=3 --stop-at 7\n" in script


@pytest.mark.parametrize(
    "fields",
    [
        *({"node_rank": 0}, {"master": "n1"}, {"nodes": 3, "ranks": 5}, {"settings": ("optimizer.lrr=1",)}),
        *({"time_limit_minutes": 9}, {"options": {"nodes": "2"}}, {"options": {"tasks": "gpu"}}),
        *({"options": {"tasks": "rank"}}, {"options": {"partition": "a\nrm"}}, {"options": {"-p": "gpu"}}),
    ],
)
def test_what_cannot_be_rendered(fields):
    with refusal(RecipeError, "launch", f"slurm {fields}", {recipes_dir(): "RECIPES"}):
        render(**fields)


def test_a_run_that_may_not_be_continued(tmp_path):
    (tmp_path / "recipe.yaml").touch()
    with refusal(RecipeError, "launch", "run that may not be continued", {tmp_path: "FOLDER"}):
        render(run_dir=tmp_path, resume="never")


@pytest.mark.cluster
def test_an_option_that_sbatch_does_not_know(slurm, tmp_path):
    outcome = vitscale(slurm, tmp_path, *SMOKE, "--cluster-option", "partitiom=main")
    assert outcome.returncode == 2 and "unrecognized option '--partitiom=main'" in outcome.stderr


def stub(folder: Path, body: str) -> str:
    """The option that puts a program in place of Python on the nodes."""
    path = folder / "stub"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return f"--cluster-option=python={path}"


def in_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.cluster
def test_what_is_done_or_would_end_like_this_again_is_not_requeued(slurm, tmp_path):
    jobs = {}
    for code in (0, 2, 3, 4):
        folder = in_folder(tmp_path / str(code))
        # One node ends a little later, with the same code.
        jobs[code] = submit(slurm, folder, *SMOKE, stub(folder, f"sleep $SLURM_NODEID; exit {code}"))
    for code, number in jobs.items():
        job = slurm.wait_for(number, "COMPLETED", "FAILED", seconds=60)
        assert (job["JobState"], job["ExitCode"]) == ("FAILED" if code else "COMPLETED", f"{code}:0")
        assert job["Restarts"] == "0"


@pytest.mark.cluster
def test_a_task_has_all_cpus_that_it_was_given(slurm, tmp_path):
    tell = stub(tmp_path, "grep Cpus_allowed_list /proc/self/status")
    number = submit(slurm, tmp_path, *SMOKE, tell, "--cluster-option", "cpus-per-task=2")
    slurm.wait_for(number, "COMPLETED", seconds=60)
    assert output(tmp_path / "runs" / "b16_jft-smoke", number).count("Cpus_allowed_list:\t0-1") == 2


@pytest.mark.cluster
@pytest.mark.slow
def test_what_may_be_repeated_is_requeued_until_it_gets_no_further(slurm, tmp_path):
    further = """echo '{"step": '$((10 * SLURM_RESTART_COUNT))'}' >>runs/b16_jft-smoke/metrics.jsonl"""
    bodies = {
        "never gets on": "exit 75",
        "is killed": "kill -9 $$",
        "has lost a node's launch": "[ $SLURM_NODEID = 1 ] || sleep 1000; kill -9 $$",
        "is told to end and never gets on": "exit 85",
        "gets on": f"[ ${{SLURM_RESTART_COUNT:-0}} -lt 4 ] || exit 0; {further}; exit 1",
    }
    jobs = {}
    for number, (name, body) in enumerate(bodies.items()):
        folder = in_folder(tmp_path / str(number))
        jobs[name] = submit(slurm, folder, *SMOKE, stub(folder, body), "--max-restarts", "1")
    ends = {}
    for name, number in jobs.items():
        job = slurm.wait_for(number, "COMPLETED", "FAILED", seconds=240)
        ends[name] = job["JobState"], job["ExitCode"], job["Restarts"]
    assert ends == {
        "never gets on": ("FAILED", "75:0", "1"),
        "is killed": ("FAILED", "137:0", "1"),
        "has lost a node's launch": ("FAILED", "137:0", "1"),
        "is told to end and never gets on": ("FAILED", "85:0", "1"),
        "gets on": ("COMPLETED", "0:0", "4"),
    }


@pytest.mark.cluster
def test_a_run_over_both_nodes(slurm, tmp_path):
    number = submit(slurm, tmp_path, *SMOKE, "--ranks", "1")
    run = Run(tmp_path, tmp_path / "runs" / "b16_jft-smoke")
    job = slurm.wait_for(number, "COMPLETED", "FAILED", seconds=120)
    shown = output(run.dir, number)
    assert job["ExitCode"] == "0:0" and run.is_done(), shown
    assert [event["world_size"] for event in run.events("started")] == [2, 2], shown
    assert [line["step"] for line in run.lines() if "loss" in line] == [1, 2, 3, 4]
