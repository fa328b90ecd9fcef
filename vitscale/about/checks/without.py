"""Branches of a run that have never seen given samples: the step to start from, the cost, and the branch's recipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.about.checks.named_samples import Near, named_samples
from vitscale.about.checks.seen import History, shards_with
from vitscale.data.shards import Manifest
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
    """Where a branch starts."""

    step: int  # of a checkpoint; 0 for the beginning
    init: dict[str, Any] | None  # of its recipe: the checkpoint, or what the run began with; None for random weights


def _start_before(run_dir: Path, step: int) -> Start:
    """The newest checkpoint before an update, from the run or the trunks that it branched from; or the beginning.

    Only indices are read. Raises `CheckpointError` if a trunk that would have the checkpoint no longer exists, or if
    runs continue each other.
    """
    recipe, limit, seen = recipe_of_run(run_dir), step - 1, set[Path]()
    while True:
        if run_dir.resolve() in seen:
            raise CheckpointError(f"{run_dir} continues itself, by way of other runs")
        seen.add(run_dir.resolve())
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


def _cost_of(run: Run, steps: int) -> dict[str, Any]:
    """The cost of repeating steps at the run's own mean speed, that of all devices; unknown without metrics."""
    spent = run.cost
    if spent is None:
        return {"steps": steps, **dict.fromkeys(("exaflops", "hours", "images_per_s", "world_size"))}
    batch = run.recipe.batch.global_size
    return {
        "steps": steps,
        "exaflops": steps * (spent.exaflops * batch / spent.images),
        "hours": steps * batch / spent.images_per_s / 3600 if spent.images_per_s else None,
        "images_per_s": spent.images_per_s,
        "world_size": spent.world_size,
    }


def _branch_recipe(history: History, start: Start, view: str, root: str | None) -> Recipe:
    """The recipe of a branch on a `view` of the run's data, with its schedule in steps: the view has shorter epochs.

    Its `data.root` is absolute, so that the branch can begin in any folder: `root`, or where the data were.
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


def leave_out(
    names: Sequence[str], run_dir: Path, out: str | None, root: str | None, write: Write, near: Near | None
) -> dict[str, Any]:
    """Find where a branch without some samples has to start; write its dataset and recipe to `out`, if given, a folder.

    `names` and `near` are those of `named_samples`; the run's data are now below `root`, by default where they were.
    Returns what `vitscale without --json` prints. Raises `RecipeError`, `DataError`, `CheckpointError`, `StorageError`.
    """
    history, run = History(run_dir, root), Run(run_dir)
    samples = named_samples(history, names, near)
    places = list({each.place.uid: each.place for each in samples if each.place is not None}.values())
    first, times = history.updates(places)
    seen = np.flatnonzero(first)
    earliest = None if not len(seen) else int(seen[np.argmin(first[seen])])
    uids = np.array(sorted(place.uid for place in places if place.at[-1] is not None), np.int64)
    total, _ = schedule_in_steps(history.recipe, history.newest.num_samples)
    finished = read_done(run_dir) is not None or history.steps >= total
    found: dict[str, Any] = {
        "run": str(run_dir),
        "steps": history.steps,
        "is_finished": finished,
        "data": history.newest.where,
        "samples": history.newest.num_samples,
        "uids": uids.tolist(),
        "left_out_already": [place.uid for place in places if place.at[-1] is None],
        "not_in_data": [each.name for each in samples if each.place is None],
        "seen": len(seen),
        "updates": int(times.sum()),
        "first_step": None if earliest is None else int(first[earliest]),
        "first_uid": None if earliest is None else places[earliest].uid,
        "notes": list(_notes(history, run)),
        **dict.fromkeys(("start", "again", "view", "recipe", "command")),
    }
    needs_branch = earliest is not None or (not finished and len(uids) > 0)
    if needs_branch:
        # If an unfinished run has not seen them yet, it would later: the branch starts at its newest checkpoint.
        start = _start_before(run_dir, history.steps + 1 if earliest is None else int(first[earliest]))
        found |= {"start": asdict(start), "again": _cost_of(run, history.steps - start.step)}
    if out is None or not (needs_branch or len(uids)):
        return found
    where = without_file_scheme(out) if is_url(out) else str(Path(without_file_scheme(out)).expanduser().absolute())
    beside: dict[str, bytes] = {}
    if needs_branch:
        recipe = _branch_recipe(history, start, where, root)
        beside[RECIPE_NAME] = without_secrets(dump_yaml(recipe.dump())).encode()
        found["recipe"] = join(where, RECIPE_NAME)
        of_branch = run_dir.with_name(f"{run_dir.resolve().name}-without")
        found["command"] = shell_line(["vitscale", "launch", found["recipe"], "--run-dir", str(of_branch)])
    view = write(history.newest, uids, where, beside)
    gone = np.unique(np.array([place.uid for place in places], np.int64))
    pairs = shards_with(view, gone)  # what a dataset holds, its order draws
    if drawn := [uid for shard, few in pairs for uid in np.intersect1d(shard.file.uid[shard.slots], few).tolist()]:
        raise DataError(f"{view.where}: still has {counted(len(drawn), 'sample')} of those named, as uid {drawn[0]}")
    found["view"] = {"where": view.where, "sha256": view.sha256, "samples": view.num_samples, "drawn": 0}
    return found


def _notes(history: History, run: Run) -> Iterator[str]:
    """Notes about what the order alone does not show."""
    init = history.recipe.init
    if init is not None and not init.continues:
        yield f"it began with the weights of {init.source}: ask that run whether these have seen the samples"
    is_substituting = history.recipe.data.bad_samples == "substitute"
    if is_substituting and any(row.get("bad_samples") for row in run.metrics.rows):
        yield "damaged samples were replaced by others of their shards, and which these were is told nowhere"
