"""Repeats some steps of a run in a temporary folder, as `vitscale launch` does them."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.ground.errors import DataError
from vitscale.ground.files.durable import write_text
from vitscale.launch import Pretraining
from vitscale.launch.clusters import Job, launch_command
from vitscale.recipe import Recipe, validate_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.checkpoint import CheckpointReader, CheckpointStore
from vitscale.runs.checkpoint_index import index_text
from vitscale.runs.metrics import MetricsLog
from vitscale.runs.names import CHECKPOINTS, INDEX_FILE, RECIPE_FILE, step_folder
from vitscale.runs.run import Run


def bare_recipe(recipe: Recipe, evaluation: Mapping[str, Any] | None = None) -> Recipe:
    """The run's recipe without everything that does not affect its steps; with this `evaluation`, if any."""
    content = recipe.dump()
    content["logging"] |= {"every": 1, "trackers": [], "batch_digest": True}
    content["evaluation"] = dict(evaluation or {})
    content["selection"] = None
    content["checkpoint"] = {"keep": 1_000_000, "tail": None}
    del content["profile"]
    return validate_recipe(content, "the recipe of the run")


@contextmanager
def repeated(
    recipe: Recipe, start: CheckpointReader | None, last: int, ranks: int
) -> Iterator[tuple[MetricsLog, CheckpointStore]]:
    """Continue a run from a checkpoint, or from its beginning, to step `last` in a temporary folder.

    Raises `DataError` if that cannot be done on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="vitscale-verify-") as temporary:
        copy, output = Path(temporary, "run"), Path(temporary, "log")
        copy.mkdir()
        if start is not None:
            folder = copy / CHECKPOINTS / step_folder(start.index.step)
            start.copy(folder)
            write_text(folder / INDEX_FILE, index_text(replace(start.index, recipe=recipe.dump(), selection={})))
        (copy / RECIPE_FILE).write_text(dump_yaml(recipe.dump()))
        what = Pretraining(str(copy / RECIPE_FILE), run_dir=copy, ranks=ranks, stop_at=last)
        command = launch_command(Job(what, max_restarts=0), [sys.executable, "-P", "-m", "vitscale"])
        with output.open("wb") as file:
            code = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        if code:
            text = output.read_text(errors="replace")[-2000:].rstrip()
            raise DataError(f"what the run did could not be repeated: exit code {code}:\n{text}")
        yield Run(copy).metrics, CheckpointStore(copy / CHECKPOINTS)
