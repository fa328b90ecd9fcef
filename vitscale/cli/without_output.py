"""What `vitscale without` does and prints."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_tools.leaving_out import write_without
from vitscale.cli.asked import asked_samples
from vitscale.errors import DataError
from vitscale.launch.clusters import shell_line
from vitscale.replay.seen import History
from vitscale.replay.without import branch_recipe, cost_of, drawn_from, is_finished, start_before
from vitscale.runs.run import Run
from vitscale.safe_text import without_secrets
from vitscale.storage import is_url, join, without_file_scheme
from vitscale.wording import counted

RECIPE_NAME = "branch.yaml"


def show_without(
    samples: Sequence[str], run: Path, out: str | None, root: str | None, *, near: bool, as_json: bool
) -> None:
    """Print where a branch without some samples has to start; if `out` is given, write its dataset and recipe.

    Raises `RecipeError`, `DataError`, `CheckpointError` and `StorageError`.
    """
    found = leave_out(samples, run, out, root, near=near)
    if as_json:
        print(json.dumps(found))
    else:
        for line in _told(found):
            print(line)


def leave_out(samples: Sequence[str], run: Path, out: str | None, root: str | None, *, near: bool) -> dict[str, Any]:
    """Does the work of `show_without`; returns what that prints with --json."""
    history = History.of(run, root)
    asked = asked_samples(history, samples, near=near)
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
        beside[RECIPE_NAME] = without_secrets(yaml.safe_dump(recipe.dump(), sort_keys=False)).encode()
        found["recipe"] = join(where, RECIPE_NAME)
        of_branch = run.with_name(f"{run.resolve().name}-without")
        found["command"] = shell_line(["vitscale", "launch", found["recipe"], "--run-dir", str(of_branch)])
    view = write_without(history.newest, uids, where, beside)
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


def _told(found: dict[str, Any]) -> Iterator[str]:
    run, uids = found["run"], found["uids"]
    others = [f"{counted(len(found['not_in_data']), 'image')} not stored in the data"] if found["not_in_data"] else []
    already = found["left_out_already"]
    others += [f"{counted(len(already), 'sample')} left out already"] if already else []
    yield f"{found['data']}: {counted(len(uids), 'sample')} to leave out" + "".join(f"; {each}" for each in others)
    if found["first_step"] is None:
        yield f"{run}: never seen in {counted(found['steps'], 'step')}"
    else:
        yield (
            f"{run}: {found['seen']:,} of them seen in {counted(found['steps'], 'step')}, "
            f"{counted(found['updates'], 'time')}; first at step {found['first_step']:,} (uid {found['first_uid']})"
        )
    yield from (f"note: {note}" for note in found["notes"])
    yield from _branch_told(found)
    view = found["view"]
    if view is not None:
        yield (
            f"written: {view['where']}: {view['samples']:,} of {found['samples']:,} samples; read back, and none of "
            f"those named is among them"
        )
    if found["command"] is not None:
        fetch = " (copy the recipe to this machine first)" if is_url(found["recipe"]) else ""
        yield f"continue with{fetch}: {found['command']}"
    elif view is None and (found["start"] or uids):
        yield f"--out FOLDER writes the dataset without them{' and the recipe of the branch' if found['start'] else ''}"


def _branch_told(found: dict[str, Any]) -> Iterator[str]:
    start, again = found["start"], found["again"]
    if start is None:
        yield "no branch is needed"
        return
    beginning = "the beginning: no checkpoint is old enough"
    where = f"step {start['step']:,} of {start['init']['from']}" if start["step"] else beginning
    if not again["steps"]:
        yield f"continue from {where}: no step is repeated"
        return
    cost = "what they cost is not known: there are no metrics"
    if again["exaflops"] is not None:
        devices = f" on {counted(again['world_size'], 'device')}" if again["world_size"] else ""
        pace = f"{again['images_per_s']:,.4g} images/s{devices}"
        cost = f"{again['exaflops']:.3g} exaFLOPs, {again['hours']:.3g} hours at the run's {pace}"
    yield f"a branch starts from {where}; {counted(again['steps'], 'step')} are taken again: {cost}"
