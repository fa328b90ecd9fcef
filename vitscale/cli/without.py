"""`vitscale without`: from which step a run has to branch off without some images, and what it costs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from vitscale.cli.options import DataRoot, Json
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted


def without(
    samples: Annotated[
        list[str],
        Argument(
            metavar="LIST|UID|IMAGE...", help="What to leave out: lists of uids, uids, images, folders; - for a list."
        ),
    ],
    run: Annotated[Path, Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        str | None,
        Option(metavar="FOLDER", help="New: for the dataset without them (a view) and the branch's recipe."),
    ] = None,
    near: Annotated[
        bool, Option("--near", help="Copies of the images, too, as `vitscale dedup` finds them: reads all data.")
    ] = False,
    root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Go on without some images: from which step a run has to branch off that has not seen them, and what it costs.

    With --out, write the dataset without them and the recipe of the branch.
    """
    from data_tools.dedup.near import copies_of
    from data_tools.views import write_without
    from vitscale.about.checks.without import leave_out  # which loads torch

    found = leave_out(samples, run, out, root, write_without, copies_of if near else None)
    if as_json:
        print(json.dumps(found))
    else:
        print(*_lines(found), sep="\n")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    run, uids = found["run"], found["uids"]
    unknown, already = found["not_in_data"], found["left_out_already"]
    more = f"; {counted(len(unknown), 'image')} not stored in the data" if unknown else ""
    more += f"; {counted(len(already), 'sample')} left out already" if already else ""
    yield f"{found['data']}: {counted(len(uids), 'sample')} to leave out{more}"
    if found["first_step"] is None:
        yield f"{run}: never seen in {counted(found['steps'], 'step')}"
    else:
        yield (
            f"{run}: {found['seen']:,} of them seen in {counted(found['steps'], 'step')}, "
            f"{counted(found['updates'], 'time')}; first at step {found['first_step']:,} (uid {found['first_uid']})"
        )
    yield from (f"note: {note}" for note in found["notes"])
    yield _branch(found)
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


def _branch(found: dict[str, Any]) -> str:
    start, again = found["start"], found["again"]
    if start is None:
        return "no branch is needed"
    beginning = "the beginning: no checkpoint is old enough"
    where = f"step {start['step']:,} of {start['init']['from']}" if start["step"] else beginning
    if not again["steps"]:
        return f"continue from {where}: no step is repeated"
    cost = "what they cost is not known: there are no metrics"
    if again["exaflops"] is not None:
        devices = f" on {counted(again['world_size'], 'device')}" if again["world_size"] else ""
        pace = f"{again['images_per_s']:,.4g} images/s{devices}"
        cost = f"{again['exaflops']:.3g} exaFLOPs, {again['hours']:.3g} hours at the run's {pace}"
    return f"a branch starts from {where}; {counted(again['steps'], 'step')} are taken again: {cost}"
