"""Who a rank or a launch is, by the variables of each launcher; and what is refused instead of guessed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from messages import refusal

from vitscale.ground.errors import RecipeError
from vitscale.launch import ThisNode, find_place, read_environment
from vitscale.launch.environment import expand_nodes

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# As two nodes of a real Slurm have it, for the third of three tasks.
STEP = {
    **{"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"},
    **{"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"},
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "MPI_")


@pytest.fixture
def environment():
    """Sets exactly these variables of launchers; what the code sets is undone."""
    before = dict(os.environ)

    def use(*parts: dict[str, str], **more: str) -> None:
        for name in [*os.environ]:
            if name in (*TORCH, "LOCAL_WORLD_SIZE", "LOCAL_SIZE") or name.startswith(LAUNCHERS):
                del os.environ[name]
        for part in (*parts, more):
            os.environ.update(part)

    use()
    yield use
    os.environ.clear()
    os.environ.update(before)


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "expected", "meets_at"),
    [
        ({}, (0, 1, 0, 1), "127.0.0.1"),
        (TORCH, (1, 4, 1, 4), "127.0.0.1:29501"),
        (TORCH | {"LOCAL_WORLD_SIZE": "2"}, (1, 4, 1, 2), "127.0.0.1:29501"),  # torchrun
        (TORCH | {"LOCAL_SIZE": "2"}, (1, 4, 1, 2), "127.0.0.1:29501"),  # deepspeed
        (OPEN_MPI, (2, 4, 2, 4), "127.0.0.1:29500"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "gpu07"}, (2, 4, 2, 3), "gpu07:29500"),
        (HYDRA, (1, 2, 1, 2), "127.0.0.1:29500"),
        (STEP, (2, 3, 0, 1), "gpu07:23456"),
        (STEP | {"MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "4000"}, (2, 3, 0, 1), "gpu07-ib:4000"),
        (STEP | {"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (2, 8, 0, 4), "gpu07:23456"),
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}, (2, 3, 0, 1), "gpu07:23456"),  # srun --mpi=pmi2
        (STEP | TORCH, (1, 4, 1, 4), "127.0.0.1:29501"),  # deepspeed or a launch inside a Slurm step
        (STEP | OPEN_MPI, (2, 4, 2, 4), "127.0.0.1:29500"),  # mpirun inside a job: the step is that of its daemon
        # The batch script itself, and an interactive shell, are steps with special numbers or none.
        (without(STEP, "SLURM_STEP_ID") | {"SLURM_NTASKS": "1"}, (0, 1, 0, 1), "127.0.0.1"),
        (STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1"}, (0, 1, 0, 1), "127.0.0.1"),
    ],
)
def test_each_launcher_s_variables_are_taken_and_those_of_torch_are_set(environment, variables, expected, meets_at):
    environment(variables)
    assert read_environment() == expected
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert tuple(map(int, found)) == expected
    assert f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}".startswith(meets_at)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        *((TORCH, name) for name in TORCH),
        *((OPEN_MPI, name) for name in OPEN_MPI),
        *((HYDRA, name) for name in HYDRA if name != "PMI_RANK"),
        *((STEP, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")),
        (STEP, "SLURM_STEP_NODELIST"),
        (STEP, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_a_half_set_environment_names_what_is_missing(environment, variables, missing):
    environment(without(variables, missing))
    with pytest.raises(RecipeError, match=rf"without .*\b{missing}\b"):
        read_environment()


@pytest.mark.parametrize(
    "variables",
    [
        *(TORCH | {"RANK": "one"}, STEP | {"SLURM_PROCID": "x"}, TORCH | {"RANK": "4"}, TORCH | {"WORLD_SIZE": "0"}),
        *(TORCH | {"MASTER_PORT": "99999"}, TORCH | {"LOCAL_RANK": "-1"}, TORCH | {"LOCAL_WORLD_SIZE": "1"}),
        *(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, {"PMIX_RANK": "0"}, without(STEP, "SLURM_STEP_ID")),
    ],
)
def test_what_cannot_be_or_would_leave_others_out_is_refused(environment, variables):
    environment(variables)
    with refusal(RecipeError, "launch", str(variables)):
        read_environment()


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,07],login", "n1 n2 n3 n07 login"),
        ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
    ],
)
def test_lists_of_nodes(names, hosts):
    assert expand_nodes(names) == hosts.split()


@pytest.mark.parametrize("names", ["", "n[1-", "n[a-b]", "n[3-1]", "n1]"])
def test_lists_of_nodes_that_cannot_be_read(names):
    with pytest.raises(RecipeError, match=re.escape(repr(names))):
        expand_nodes(names)


LAUNCH_STEP = STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({}, (None, None, None), None),
        ({}, (1, None, None), None),
        ({}, (2, 1, "a:7"), ThisNode(1, 2, "a", 7, 60)),
        ({}, (2, 0, "[::1]:7"), ThisNode(0, 2, "::1", 7, 60)),
        ({}, (2, 0, "[fe80::1]"), ThisNode(0, 2, "fe80::1", 29600, 60)),
        (LAUNCH_STEP, (None, None, None), ThisNode(1, 2, "gpu07", 13456, 60)),
        (LAUNCH_STEP, (None, None, "ib0:5"), ThisNode(1, 2, "ib0", 5, 60)),
        (LAUNCH_STEP, (4, 3, "a"), ThisNode(3, 4, "a", 29600, 60)),
        (LAUNCH_STEP | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}, (None, None, None), None),
        (without(LAUNCH_STEP, "SLURM_STEP_ID"), (1, None, None), None),
    ],
)
def test_the_place_of_a_launch(environment, variables, given, expected):
    environment(variables)
    assert find_place(*given, wait_s=60) == expected


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        *(({}, (2, None, None)), ({}, (None, 1, "a")), ({}, (2, 2, "a")), ({}, (2, 0, "a:b")), ({}, (2, 0, "a:99999"))),
        (without(LAUNCH_STEP, "SLURM_NODEID"), (None, None, None)),
        *((without(LAUNCH_STEP, "SLURM_STEP_NODELIST"), (None, None, None)), (STEP, (None, None, None))),
        (without(LAUNCH_STEP, "SLURM_STEP_ID"), (None, None, None)),
    ],
)
def test_a_place_that_is_not_clear_is_refused(environment, variables, given):
    environment(variables)
    with refusal(RecipeError, "launch", f"{variables} {given}"):
        find_place(*given, wait_s=60)


READ = "from vitscale.launch import read_environment; print(tuple(read_environment()))"
AS_DEEPSPEED = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv.pop()]).returncode)"


@pytest.mark.parametrize("option", [["--hostfile", "hosts"], ["-H", "hosts"], ["--hostfile=hosts"]])
def test_a_hostfile_that_deepspeed_did_not_find_is_refused(environment, tmp_path, option):
    """By the command line of an ancestor, here one that has DeepSpeed's and does nothing else."""
    (tmp_path / "deepspeed").write_text(AS_DEEPSPEED)
    command = [sys.executable, str(tmp_path / "deepspeed"), *option, "vitscale/pretrain.py", READ]
    root = Path(__file__).parents[2]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(root)}, "capture_output": True, "text": True}
    refused = subprocess.run(command, **options)
    assert refused.returncode == 1 and "--hostfile hosts" in refused.stderr
    (tmp_path / "hosts").touch()
    accepted = subprocess.run(command, **options)
    assert accepted.stdout == "(0, 1, 0, 1)\n", accepted.stderr
