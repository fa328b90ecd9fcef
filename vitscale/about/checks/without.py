"""Branches of a run that have never seen given samples: the step to start from, the cost, and the branch's recipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.about.checks.asked import Near, asked_samples
from vitscale.about.checks.seen import History
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import CheckpointError, DataError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url, join, without_file_scheme
from vitscale.ground.wording import counted
from vitscale.launch.clusters import shell_line
from vitscale.recipe import Duration, Recipe, read_recipe, validate_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.checkpoint import checkpoint_directory
from vitscale.runs.checkpoint_index import data_root, find_path
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.done import read_done
from vitscale.runs.names import RECIPE_FILE
from vitscale.runs.run import Run
from vitscale.training.beginning.run_plan import schedule_in_steps

RECIPE_NAME = "branch.yaml"

Write = Callable[[Manifest, np.ndarray, str, Mapping[str, bytes]], Manifest]
"""(a dataset, uids to leave out, a new folder, contents of more files for it) -> the dataset that was written."""


@dataclass(frozen=True)
class Start:
    """Where a branch starts.

    Attributes:
        step: the checkpoint's step; 0 for the beginning.
        init: the `init` block of the branch's recipe: the checkpoint, or what the run began with; None for random
            weights.
    """

    step: int
    init: dict[str, Any] | None


@dataclass(frozen=True)
class Cost:
    """The cost of repeating steps, at the run's own speed.

    Attributes:
        steps: the number of steps.
        exaflops: their compute, as the run's metrics count it; None if there are no metrics.
        hours: the time of these steps at `images_per_s`; None if there are no metrics.
        images_per_s: the speed of all devices together, over the whole run; None if there are no metrics.
        world_size: the number of devices in the run's last steps; None if there are no metrics.
    """

    steps: int
    exaflops: float | None
    hours: float | None
    images_per_s: float | None
    world_size: int | None


def is_finished(history: History, run_dir: Path) -> bool:
    """Whether a run is finished: no further step will be taken."""
    total, _ = schedule_in_steps(history.recipe, history.newest.num_samples)
    return read_done(run_dir) is not None or history.steps >= total


def start_before(run_dir: Path, step: int) -> Start:
    """The newest checkpoint before an update, from the run or the trunks that it branched from; or the beginning.

    Only indices are read. Raises `CheckpointError` if a trunk that would have the checkpoint no longer exists.
    """
    recipe, limit = recipe_of_run(run_dir), step - 1
    while True:
        place = checkpoint_directory(recipe, run_dir)
        for saved in sorted((each for each in place.steps() if each <= limit), reverse=True):
            try:
                place.read_index(saved)
            except CheckpointError:
                continue
            return Start(saved, _continuing(run_dir, saved))
        init = recipe.init
        if init is None:
            return Start(0, None)
        steps = place.steps()
        path = find_path(init.source, place.read_index(steps[-1]) if steps else None, run_dir).absolute()
        if not init.continues:
            return Start(0, init.model_dump(by_alias=True) | {"from": str(path)})
        if not path.exists():
            raise CheckpointError(
                f"{run_dir} continues {init.source}, where the samples were first seen, and which is no longer there"
            )
        limit = min(limit, init.step or 0)
        if not (path / RECIPE_FILE).is_file():  # one checkpoint
            if limit == init.step:
                return Start(limit, _continuing(path, limit))
            raise CheckpointError(
                f"{run_dir} continues {path}, a single checkpoint of step {init.step:,}, and the samples were seen "
                f"before it, so there is no earlier one to start from. Name the run that it belongs to"
            )
        run_dir, recipe = path, read_recipe(path / RECIPE_FILE)


def _continuing(path: Path, step: int) -> dict[str, Any]:
    return {"from": str(path.absolute()), "step": step, "continue": True}


def cost_of(run_dir: Path, history: History, step: int) -> Cost:
    """The cost of the run's steps after `step`, which a branch from there has to repeat."""
    steps = history.steps - step
    run = Run(run_dir)
    spent = run.cost
    if spent is None:
        return Cost(steps, None, None, None, None)
    per_step = spent.exaflops * run.recipe.batch.global_size / spent.images
    hours = steps * run.recipe.batch.global_size / spent.images_per_s / 3600
    return Cost(steps, steps * per_step, hours, spent.images_per_s, spent.world_size)


def branch_recipe(history: History, start: Start, view: str, root: str | None) -> Recipe:
    """The recipe of a branch on a view of the run's data, with its schedule in steps: the view has shorter epochs.

    Its `data.root` is absolute, so that the branch can begin in any folder.

    Args:
        history: the run's history.
        start: where the branch starts.
        view: where the view will be.
        root: where the run's data are now; by default where they were.
    """
    content = history.index.recipe | {"init": start.init}
    before = history.index.num_samples or history.newest.num_samples
    content["schedule"] = _in_steps(content["schedule"], before, history.recipe.batch.global_size)
    root = root or data_root(history.recipe, history.index)
    if root is not None and not is_url(root):
        root = str(Path(root).expanduser().absolute())
    content["data"] = content["data"] | {"train": view, "root": root}
    return validate_recipe(content, "the recipe of the branch")


def _in_steps(content: Any, num_samples: int, global_batch: int) -> Any:
    """A part of a recipe, as plain data, with durations in epochs converted to steps."""
    if isinstance(content, list):
        return [_in_steps(each, num_samples, global_batch) for each in content]
    if not isinstance(content, dict):
        return content
    if content.get("epochs") is not None:
        return {"steps": Duration(**content).to_steps(num_samples, global_batch)}
    return {key: _in_steps(each, num_samples, global_batch) for key, each in content.items()}


def drawn_from(view: Manifest, uids: np.ndarray) -> list[int]:
    """The uids among `uids` that a dataset holds, and that its order therefore draws.

    Every shard that could hold one is read.
    """
    first_uids = np.array([shard.first_uid for shard in view.shards])
    found: list[int] = []
    for number in np.unique(np.searchsorted(first_uids, uids, side="right") - 1).tolist():
        if number >= 0:
            with open_shard(view, number, with_keys=False) as shard:
                found += np.intersect1d(shard.file.uid[shard.slots], uids).tolist()
    return found


def leave_out(
    samples: Sequence[str], run: Path, out: str | None, root: str | None, write: Write, near: Near | None = None
) -> dict[str, Any]:
    """Find where a branch without some samples has to start; if `out` is given, write its dataset and recipe.

    Args:
        samples: names of samples, as in `asked_samples`.
        run: the run's directory.
        out: a new folder, or URL; None to write nothing.
        root: where the run's data are now; by default where they were.
        write: writes a dataset without samples.
        near: finds copies of images, to be left out as well.

    Returns what `vitscale without --json` prints. Raises `RecipeError`, `DataError`, `CheckpointError` and
    `StorageError`.
    """
    history = History.of(run, root)
    asked = asked_samples(history, samples, near)
    places = list({each.place.uid: each.place for each in asked if each.place is not None}.values())
    first, times = history.updates(places)
    seen = np.flatnonzero(first)
    earliest = None if not len(seen) else int(seen[np.argmin(first[seen])])
    uids = np.array(sorted(place.uid for place in places if place.at[-1] is not None), np.int64)
    finished = is_finished(history, run)
    found: dict[str, Any] = {
        "run": str(run),
        "steps": history.steps,
        "is_finished": finished,
        "data": history.newest.where,
        "samples": history.newest.num_samples,
        "uids": uids.tolist(),
        "left_out_already": [place.uid for place in places if place.at[-1] is None],
        "not_in_data": [each.what for each in asked if each.place is None],
        "seen": len(seen),
        "updates": int(times.sum()),
        "first_step": None if earliest is None else int(first[earliest]),
        "first_uid": None if earliest is None else places[earliest].uid,
        "notes": list(_notes(history, run)),
        "start": None,
        "again": None,
        "view": None,
        "recipe": None,
        "command": None,
    }
    needs_branch = earliest is not None or (not finished and len(uids) > 0)
    if needs_branch:
        # If an unfinished run has not seen them yet, it would later: the branch starts at its newest checkpoint.
        start = start_before(run, history.steps + 1 if earliest is None else int(first[earliest]))
        found |= {"start": asdict(start), "again": asdict(cost_of(run, history, start.step))}
    if out is None or not (needs_branch or len(uids)):
        return found
    where = without_file_scheme(out) if is_url(out) else str(Path(without_file_scheme(out)).expanduser().absolute())
    beside: dict[str, bytes] = {}
    if needs_branch:
        recipe = branch_recipe(history, start, where, root)
        beside[RECIPE_NAME] = without_secrets(dump_yaml(recipe.dump())).encode()
        found["recipe"] = join(where, RECIPE_NAME)
        of_branch = run.with_name(f"{run.resolve().name}-without")
        found["command"] = shell_line(["vitscale", "launch", found["recipe"], "--run-dir", str(of_branch)])
    view = write(history.newest, uids, where, beside)
    if drawn := drawn_from(view, np.array([place.uid for place in places], np.int64)):
        raise DataError(f"{view.where}: still has {counted(len(drawn), 'sample')} of those named, as uid {drawn[0]}")
    found["view"] = {"where": view.where, "sha256": view.sha256, "samples": view.num_samples, "drawn": len(drawn)}
    return found


def _notes(history: History, run: Path) -> Iterator[str]:
    """Notes about what the order alone does not show."""
    init = history.recipe.init
    if init is not None and not init.continues:
        yield f"it began with the weights of {init.source}: ask that run whether these have seen the samples"
    is_substituting = history.recipe.data.bad_samples == "substitute"
    if is_substituting and any(row.get("bad_samples") for row in Run(run).metrics.rows):
        yield "damaged samples were replaced by others of their shards, and which these were is told nowhere"
