"""Reads this process's place from its launcher's variables: a rank among ranks, or a launch among nodes. No torch.

Every launcher has variables of its own. Whichever it was, afterwards torch's variables are set, for everything that
reads those.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vitscale.ground.errors import RecipeError
from vitscale.ground.machine import free_port
from vitscale.ground.wording import counted
from vitscale.launch.nodes import DEFAULT_PORT, ThisNode

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASK_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_DEFAULT_PORT = 29500  # torch's
# Steps that Slurm makes for itself have numbers from here: the batch script, an interactive shell.
_FIRST_SPECIAL_STEP = 2**32 - 6


class RankEnvironment(NamedTuple):
    """A rank among the ranks, and among those on its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_environment() -> RankEnvironment:
    """This rank, from deepspeed, torchrun, Open MPI, another MPI or Slurm; one rank alone without a launcher.

    RANK and WORLD_SIZE take precedence over all others, and MPI over Slurm, because inside a Slurm job Slurm's
    variables are those of MPI's own daemon. Sets torch's variables, LOCAL_WORLD_SIZE among them.

    Raises `RecipeError` naming what is missing if the environment is half set, for impossible values, and if the
    launcher has quietly left out the other machines.
    """
    _refuse_a_missing_hostfile()
    found = os.environ
    if "RANK" in found or "WORLD_SIZE" in found:
        _require(_TORCH, "start with deepspeed, torchrun, vitscale launch or plain python, or set all of them")
        values = {name: found[name] for name in _TORCH if name != "MASTER_ADDR"}
        values["LOCAL_WORLD_SIZE"] = found.get("LOCAL_WORLD_SIZE") or found.get("LOCAL_SIZE") or values["WORLD_SIZE"]
        address = found["MASTER_ADDR"]
    elif "OMPI_COMM_WORLD_RANK" in found or "OMPI_COMM_WORLD_SIZE" in found:
        values, address = _of_mpi(_OPEN_MPI, "mpirun -x MASTER_ADDR=<host of rank 0>")
    elif "PMI_RANK" in found and ("MPI_LOCALRANKID" in found or not _is_in_a_step()):  # srun --mpi=pmi2 sets half of it
        values, address = _of_mpi(_PMI, "mpiexec -genv MASTER_ADDR <host of rank 0>")
    elif _is_in_a_step():
        values, address = _of_slurm()
    else:
        _refuse_to_be_one_of_several("SLURM_NTASKS", "tasks")
        values = _torch_values("0", "1", "0", "1", free_port())
        address = "127.0.0.1"
    try:
        rank, size, local_rank, port, local_size = (
            int(values[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE")
        )
    except ValueError:
        raise RecipeError(f"the launch environment should hold whole numbers, but holds {values}") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size and 0 < port < 65536 and address):
        raise RecipeError(f"the launch environment is impossible: {values}, MASTER_ADDR {address!r}")
    os.environ.update(values, MASTER_ADDR=address)
    return RankEnvironment(rank, size, local_rank, local_size)


def find_place(nodes: int | None, node_rank: int | None, master: str | None, *, wait_s: float) -> ThisNode | None:
    """This launch's place among those of other nodes: as given, else as Slurm has it; None for one node.

    `master` is HOST or HOST:PORT of node 0. Raises `RecipeError` if something is missing or impossible.
    """
    in_a_step = _is_in_a_step()
    if nodes is None and node_rank is None and master is None and not in_a_step:
        _refuse_to_be_one_of_several("SLURM_NNODES", "nodes")
        return None
    if in_a_step and None in (nodes, node_rank, master):
        _require(("SLURM_NODEID", "SLURM_NNODES", "SLURM_NTASKS"), "start with srun")
        if nodes is None:
            nodes = _number("SLURM_NNODES")
            if _number("SLURM_NTASKS") != nodes:
                raise RecipeError(
                    f"srun has started {counted(_number('SLURM_NTASKS'), 'task')} on {counted(nodes, 'node')}, but a "
                    f"launch starts the ranks of its node itself: srun --ntasks-per-node=1 vitscale launch ..."
                )
        node_rank = _number("SLURM_NODEID") if node_rank is None else node_rank
        if master is None and nodes > 1:
            master = f"{_first_host()}:{_port_of_the_job(10000)}"
    if nodes == 1 and not node_rank:
        return None
    if nodes is None or node_rank is None or master is None:
        options = {"--nodes": nodes, "--node-rank": node_rank, "--master": master}
        present = [name for name, value in options.items() if value is not None]
        missing = [name for name, value in options.items() if value is None]
        raise RecipeError(
            f"{', '.join(present)} without {', '.join(missing)}: every node's launch needs all of --nodes N, "
            f"--node-rank 0 to N-1 and --master HOST[:PORT]; only srun sets them by itself"
        )
    if node_rank >= nodes:
        raise RecipeError(f"--node-rank {node_rank}: expected 0 to {nodes - 1} for {counted(nodes, 'node')}")
    address, port = split_address(master)
    return ThisNode(node_rank, nodes, address, port, wait_s)


def split_address(master: str) -> tuple[str, int]:
    """HOST[:PORT] or [IPv6][:PORT] -> (host, port). Raises `RecipeError`."""
    match = re.fullmatch(
        r"\[(?P<six>[0-9a-fA-F:.%\w]+)\](:(?P<port>\d+))?|(?P<host>[^\s:\[\]]+)(:(?P<other>\d+))?", master
    )
    port = int((match and (match["port"] or match["other"])) or DEFAULT_PORT)
    if match is None or not 0 < port < 65536:
        raise RecipeError(f"--master {master!r}: expected HOST or HOST:PORT, such as node1:{DEFAULT_PORT}")
    return match["six"] or match["host"], port


# ---- MPI -------------------------------------------------------------------------------------------------------------


def _of_mpi(names: tuple[str, ...], advice: str) -> tuple[dict[str, str], str]:
    _require(names, "start with the mpirun or mpiexec of one MPI")
    rank, size, local_rank, local_size = (os.environ[name] for name in names)
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        if local_size != size:
            raise RecipeError(f"MPI has started ranks on several machines, but does not say where rank 0 is: {advice}")
        address = "127.0.0.1"
    return _torch_values(rank, size, local_rank, local_size, str(_DEFAULT_PORT)), address


def _torch_values(rank: str, size: str, local_rank: str, local_size: str, port: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or port,
        "LOCAL_WORLD_SIZE": local_size,
    }


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def expand_nodes(names: str) -> list[str]:
    """Hosts of a list as Slurm writes it: "n[1-3,07],login" -> n1, n2, n3, n07, login. Raises `RecipeError`."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", names):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word):
            endings = [text] if text else [one for part in ranges.split(",") for one in _range(part, names)]
            expanded = [begun + ending for begun in expanded for ending in endings]
        hosts += expanded
    if not hosts or names.count("[") != names.count("]"):
        raise RecipeError(f"a list of nodes that cannot be read: {names!r}")
    return hosts


def _range(part: str, names: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise RecipeError(f"a list of nodes that cannot be read: {names!r}")
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _is_in_a_step() -> bool:
    """Whether srun started this process, rather than a batch script or a shell on a node of the job."""
    step = os.environ.get("SLURM_STEP_ID", os.environ.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _of_slurm() -> tuple[dict[str, str], str]:
    _require(_SLURM, "start with srun")
    rank, size, local_rank, node = (os.environ[name] for name in _SLURM)
    local_size = _tasks_on(int(node), int(size)) if node.isdecimal() and size.isdecimal() else size
    address = os.environ.get("MASTER_ADDR") or _first_host()
    return _torch_values(rank, size, local_rank, str(local_size), str(_port_of_the_job(20000))), address


def _port_of_the_job(first: int) -> int:
    """A port of the job's own, as jobs may share a node; below those that systems hand out."""
    job = os.environ.get("SLURM_JOB_ID", os.environ.get("SLURM_JOBID", "0"))
    return first + (int(job) if job.isdecimal() else 0) % 10000


def _tasks_on(node: int, size: int) -> int:
    """The number of the step's tasks on its n-th node, from a variable such as "2(x3),1"."""
    for name in _TASK_COUNTS:
        listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get(name, ""))
        counts = [int(count) for count, times in listed for _ in range(int(times or 1))]
        if node < len(counts) and sum(counts) == size:
            return counts[node]
    each = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if each.isdecimal():
        return int(each)
    raise RecipeError(
        "the launch environment is half set: SLURM_PROCID without SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE; "
        "start with srun"
    )


def _first_host() -> str:
    for name in _NODE_LISTS:
        if os.environ.get(name):
            return expand_nodes(os.environ[name])[0]
    raise RecipeError(f"the launch environment is half set: SLURM_NODEID without {_NODE_LISTS[0]}; start with srun")


# ---- Both ------------------------------------------------------------------------------------------------------------


def _refuse_to_be_one_of_several(count: str, of_what: str) -> None:
    """Raise `RecipeError` if several processes, or room for them, were asked for and this one would run alone."""
    if "PMIX_RANK" in os.environ:
        raise RecipeError("PMIX_RANK is set, but nothing says how many ranks there are: set RANK, WORLD_SIZE and so on")
    number = os.environ.get(count, "1")
    if "SLURM_JOB_ID" in os.environ and number.isdecimal() and int(number) > 1:
        raise RecipeError(
            f"this Slurm job has {number} {of_what} ({count}), and without srun only this one would run: srun "
            f"--ntasks-per-node=1 vitscale launch ... (to use this node alone, vitscale launch --nodes 1 ...)"
        )


def _require(names: tuple[str, ...], advice: str) -> None:
    present = [name for name in names if name in os.environ]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RecipeError(
            f"the launch environment is half set: {', '.join(present) or 'SLURM_STEP_ID'} without "
            f"{', '.join(missing)}; {advice}"
        )


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise RecipeError(f"the launch environment should hold whole numbers, but {name} is {value!r}")
    return int(value)


def _refuse_a_missing_hostfile() -> None:
    """Raise `RecipeError` if `deepspeed --hostfile FILE` runs on this machine alone because FILE does not exist.

    DeepSpeed only logs a warning and continues. Its command line is found among our ancestor processes.
    """
    for process, words in _ancestors():
        if not any(word.endswith(("/deepspeed", "/ds")) or word == "deepspeed.launcher.runner" for word in words[:4]):
            continue
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name = following if word in ("--hostfile", "-H") else word.partition("--hostfile=")[2]
            if name and not (process / "cwd" / name).is_file():
                raise RecipeError(
                    f"deepspeed was given --hostfile {name}, which is not a file, and would train on this machine "
                    f"alone; correct the path, or omit --hostfile"
                ).on_all_ranks()


def _ancestors() -> Iterator[tuple[Path, list[str]]]:
    """(folder in /proc, command line) of our parent, its parent and so on, as far as we may see them."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1:
            process = Path(f"/proc/{pid}")
            yield process, (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
