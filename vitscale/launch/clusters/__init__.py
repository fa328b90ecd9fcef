"""Clusters: where one command can start a run. Each module here is one, with `render` and `submit`."""

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ValidationError

from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import describe_mistake
from vitscale.launch.nodes import DEFAULT_PORT
from vitscale.launch.pretraining import Pretraining

CLUSTERS = {"local": "local", "hostfile": "hostfile", "slurm": "slurm", "k8s": "kubernetes"}
"""Name on the command line -> module of this package."""

_Options = TypeVar("_Options", bound=BaseModel)


@dataclass(frozen=True)
class Job:
    """A pre-training and how to start it.

    Attributes:
        nodes: number of machines; None for all that the cluster has, or one.
        node_rank, master: this machine's number and node 0's address, for clusters whose machines are each started by
            hand.
        options: options of the chosen cluster alone, as given; `read_options` checks them.
    """

    what: Pretraining
    nodes: int | None = None
    node_rank: int | None = None
    master: str | None = None
    max_restarts: int = 3
    wait_for_nodes_minutes: float = 10.0
    options: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """What a module of this package offers. Both raise `RecipeError` for what cannot be started as asked."""

    def render(self, job: Job) -> str:
        """Exactly what would run or be submitted, as text that can be used by hand. Starts and asks nothing."""

    def submit(self, job: Job) -> int:
        """Start or submit the job. Returns the exit code of `vitscale launch`."""


def find_cluster(name: str) -> Cluster:
    """The module of one of `CLUSTERS`."""
    return cast(Cluster, importlib.import_module(f"{__name__}.{CLUSTERS[name]}"))


def read_options(job: Job, kind: type[_Options]) -> _Options:
    """The job's options as a cluster's own model, whose fields are their names. Raises `RecipeError`."""
    unknown = [name for name in job.options if name not in kind.model_fields]
    if unknown:
        near = get_close_matches(unknown[0], kind.model_fields, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RecipeError(f"--cluster-option {unknown[0]}: {hint}this cluster has {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(job.options)
    except ValidationError as error:
        first: Any = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        what = describe_mistake(first | {"loc": ()})
        raise RecipeError(f"--cluster-option {name}={job.options.get(name, '')}: {what}") from None


def read_pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Read what was given as KEY=VALUE to a command's repeatable option. Raises `RecipeError`."""
    found: dict[str, str] = {}
    for pair in given:
        key, is_there, value = pair.partition("=")
        if not is_there or key in found:
            raise RecipeError(f"{option} {pair}: expected KEY=VALUE, and each KEY once")
        found[key] = value
    return found


def launch_command(
    job: Job,
    program: Sequence[str] = ("vitscale",),
    *,
    nodes: int = 1,
    node_rank: str = "0",
    master: str = "",
    ranks: int | None = None,
) -> list[str]:
    """The `vitscale launch` to run on a node; without a master, srun tells each node its number.

    Args:
        node_rank: this node's number, or a placeholder that the cluster replaces by it.
        ranks: the number of ranks of this node, in place of the job's.
    """
    what = job.what
    command = [*program, "launch", what.recipe]
    if master:
        command += ["--nodes", str(nodes), "--node-rank", node_rank, "--master", master]
        command += ["--wait-for-nodes", f"{job.wait_for_nodes_minutes:g}"]
    if ranks or what.ranks:
        command += ["--ranks", str(ranks or what.ranks)]
    if what.run_dir is not None:
        command += ["--run-dir", str(what.run_dir)]
    for setting in what.settings:
        command += ["--set", setting]
    if what.resume != "auto":
        command += ["--resume", what.resume]
    if what.time_limit_minutes is not None:
        command += ["--time-limit", f"{what.time_limit_minutes:g}"]
    if what.stop_at is not None:
        command += ["--stop-at", str(what.stop_at)]
    if what.smoke:
        command.append("--smoke")
    return [*command, "--max-restarts", str(job.max_restarts)]


def shell_words(name: str, text: str) -> list[str]:
    """The words of a cluster's option, split as a shell does. Raises `RecipeError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RecipeError(f"--cluster-option {name}={text}: {error}") from None


def refuse_node_options(job: Job, cluster: str) -> None:
    """Raise `RecipeError` if the job numbers its nodes, which the cluster does by itself."""
    if job.node_rank is not None:
        raise RecipeError(f"--node-rank cannot be used with --cluster {cluster}, which numbers the nodes itself")


def one_line(line: str) -> str:
    """A line of a script. Raises `RecipeError` if it would become two, or control a terminal."""
    if not line.isprintable():
        raise RecipeError(f"{line!r}: a line of the script with characters that cannot be printed")
    return line


def shell_line(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """A command, with what it adds to the environment, as a line to paste into a shell. Raises as `one_line`."""
    added = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return one_line(" ".join([*added, shlex.join(command)]))


__all__ = [
    "CLUSTERS",
    "DEFAULT_PORT",
    "Cluster",
    "Job",
    "find_cluster",
    "launch_command",
    "one_line",
    "read_options",
    "read_pairs",
    "refuse_node_options",
    "shell_line",
    "shell_words",
]
