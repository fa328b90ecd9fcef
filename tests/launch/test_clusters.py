"""What would run where, told without running it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from messages import refusal

import vitscale
from vitscale.ground.errors import RecipeError
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, find_cluster, launch_command

ROOT = Path(vitscale.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_local_shows_the_command_of_every_rank():
    what = Pretraining("h14_jft", ("seed=3",), Path("runs/x y"), ranks=2, stop_at=7)
    shown = find_cluster("local").render(Job(what, options={}, nodes=2, node_rank=1, master="a"))
    lines = [shlex.split(line) for line in shown.splitlines()[1:]]
    assert [line[: line.index(sys.executable)] for line in lines] == [
        ["WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=a", "MASTER_PORT=PORT", f"RANK={2 + i}", f"LOCAL_RANK={i}"]
        for i in (0, 1)
    ]
    assert all(line[-4:] == ["--set", "seed=3", "--stop-at", "7"] for line in lines)


def test_the_command_for_other_nodes_is_understood(tmp_path):
    settings = ("seed=3", "optimizer.lr=0.1")
    what = Pretraining("h14_jft", settings, Path("runs/x"), 2, "never", time_limit_minutes=5, stop_at=7, smoke=True)
    command = launch_command(Job(what), [sys.executable, "-m", "vitscale"], nodes=3, node_rank="2", master="a:7")
    shown = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, env=ENVIRONMENT, check=True).stdout
    last = shlex.split(shown.splitlines()[-1])
    assert {"WORLD_SIZE=6", "RANK=5", "MASTER_ADDR=a"} <= set(last)
    script = last[last.index("--recipe") :]
    expected = "--recipe h14_jft --run-dir runs/x --set seed=3 --set optimizer.lr=0.1 --resume never --stop-at 7"
    assert " ".join(script[:-1]) == f"{expected} --smoke --time-limit"


@pytest.mark.parametrize(
    ("options", "run_dir"),
    [({"python": 'apptainer exec "a b'}, "run"), ({"srun": "--x='"}, "run"), ({}, "a\nrm -rf b")],
)
def test_what_would_be_other_words_or_lines_is_refused(options, run_dir):
    what = Pretraining("h14_jft", ranks=1, run_dir=Path(run_dir), smoke=True)
    with refusal(RecipeError, "launch", f"slurm {options} {run_dir!r}", {Path.cwd(): "HERE"}):
        find_cluster("slurm").render(Job(what, options=options))
