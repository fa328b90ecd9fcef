"""Clusters: where one command can start a run. Each module here is one.

`render(job)` in each returns exactly what would run or be submitted, as text that can be used by hand, and starts and
asks nothing; `submit(job)` starts or submits the job and returns the exit code of `vitscale launch`. Both raise
`RecipeError` for what cannot be started as asked.
"""

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitscale.ground.errors import RecipeError, turned
from vitscale.ground.wording import counted, describe_mistake, did_you_mean
from vitscale.launch.pretraining import Pretraining, option_words
from vitscale.recipe import Recipe

_Options = TypeVar("_Options", bound=BaseModel)


@dataclass(frozen=True)
class Job:
    """A pre-training and how to start it."""

    what: Pretraining
    nodes: int | None = None  # None for one, or for as many as srun says
    node_rank: int | None = None  # for clusters whose machines are each started by hand
    master: str | None = None  # node 0's address, likewise
    max_restarts: int = 3
    wait_for_nodes_minutes: float = 10.0
    options: Mapping[str, str] = field(default_factory=dict)  # the chosen cluster's own; `read_options` checks them


def find_cluster(name: str) -> ModuleType:
    """The module of a cluster, by its name on the command line."""
    return importlib.import_module(f"{__name__}.{'kubernetes' if name == 'k8s' else name}")


def read_options(job: Job, kind: type[_Options]) -> _Options:
    """The job's options as a cluster's own model, whose fields are their names. Raises `RecipeError`."""
    unknown = [name for name in job.options if name not in kind.model_fields]
    if unknown:
        hint = did_you_mean(unknown[0], kind.model_fields)
        known = f"{hint and f'{hint} '}this cluster has {', '.join(kind.model_fields)}"
        raise RecipeError(f"--cluster-option {unknown[0]}: {known}")
    try:
        return kind.model_validate(job.options)
    except ValidationError as error:
        first: Any = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        what = describe_mistake(first | {"loc": ()})
        raise RecipeError(f"--cluster-option {name}={job.options.get(name, '')}: {what}") from None


def read_pairs(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """The values of a command's repeatable option KEY=VALUE, by key. Raises `RecipeError`."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key in values:
            raise RecipeError(f"{option} {pair}: expected KEY=VALUE, and each KEY once")
        values[key] = value
    return values


def launch_command(
    job: Job, program: Sequence[str] = ("vitscale",), *, nodes: int = 1, node_rank: str = "0", master: str = ""
) -> list[str]:
    """The `vitscale launch` of a node; `node_rank` may be a placeholder; without a master srun numbers the nodes."""
    wait = f"{job.wait_for_nodes_minutes:g}"
    meeting = {"--nodes": nodes, "--node-rank": node_rank, "--master": master, "--wait-for-nodes": wait}
    options = {"--ranks": job.what.ranks, **job.what.options, "--max-restarts": job.max_restarts}
    return [*program, "launch", job.what.recipe, *option_words((meeting if master else {}) | options)]


def shell_words(name: str, text: str) -> list[str]:
    """The words of a cluster's option, split as a shell does. Raises `RecipeError`."""
    with turned(f"--cluster-option {name}={text}", RecipeError, ValueError):
        return shlex.split(text)


def checked_recipe(job: Job, cluster: str) -> Recipe:
    """The job's recipe. Raises `RecipeError` if the job numbers its nodes, or has as many ranks as do not divide."""
    for option, value in (("--node-rank", job.node_rank), ("--master", job.master)):
        if value is not None:
            raise RecipeError(f"{option} cannot be used with --cluster {cluster}, which numbers the nodes itself")
    recipe, nodes, ranks = job.what.load(), job.nodes or 1, job.what.ranks
    if ranks and not job.what.smoke and recipe.batch.global_size % (nodes * ranks):
        raise RecipeError(
            f"{counted(nodes, 'node')} of {counted(ranks, 'rank')} do not divide batch.global "
            f"{recipe.batch.global_size:,}: choose another --ranks or --nodes"
        )
    return recipe


def one_line(line: str) -> str:
    """A line of a script. Raises `RecipeError` if it would become two, or control a terminal."""
    if not line.isprintable():
        raise RecipeError(f"{line!r}: a line of the script with characters that cannot be printed")
    return line


def shell_line(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """A command, with what it adds to the environment, as a line to paste into a shell. Raises as `one_line`."""
    added = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return one_line(" ".join([*added, shlex.join(command)]))
