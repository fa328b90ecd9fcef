"""`vitscale seen`: at which steps a run has seen an image, and how."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.table import Console
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from vitscale.about.checks.named_samples import NamedSample
    from vitscale.about.checks.seen import Sighting

_SHOWN = 20  # sightings of a sample that are printed
_RENDERED = 1000  # sightings of all samples together that are written as PNG


def seen(
    samples: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|UID|LIST...", help="Images, folders, uids, lists of uids; - for a list."),
    ],
    run: Annotated[Path, typer.Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for the pixels that were seen, as PNG.")
    ] = None,
    near: Annotated[
        bool, typer.Option("--near", help="Find copies of the images, too, as `vitscale dedup` does: reads all data.")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
) -> None:
    """Say at which steps a run has seen an image, and with which crop."""
    from PIL import Image

    from data_tools.dedup.near import copies_of
    from vitscale.about.checks.named_samples import named_samples
    from vitscale.about.checks.seen import History

    history = History(run, root)
    console, rendered = Console(), 0
    if not as_json:
        unseen = f", {counted(history.left_out, 'batch')} left out" if history.left_out else ""
        _say(
            console,
            f"{run}: {counted(history.steps, 'step')} up to its newest checkpoint{unseen}, in "
            f"{counted(history.epochs, 'epoch')} of {history.manifest.where}",
        )
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(new_folder(str(out), "--out"))
        named = named_samples(history, samples, copies_of if near else None)
        seen = iter(history.sightings([sample.place for sample in named if sample.place is not None]))
        for sample in named:
            sightings = [] if sample.place is None else next(seen)
            uid = None if sample.place is None else sample.place.uid
            if folder is not None:
                rendered += len(sightings)
                if rendered > _RENDERED:
                    raise RecipeError(f"--out: more than {_RENDERED:,} pictures; ask for fewer samples")
                for each in sightings:
                    views = [view for kind in history.pixels(each).views for view in kind[0]]
                    of_view = f"-view{each.view}" if len(views) > 1 else ""
                    picture = Image.fromarray(views[each.view].numpy())
                    picture.save(folder / f"uid{uid}-batch{each.batch}-slot{each.slot}{of_view}.png")
            if as_json:
                steps = [asdict(each) for each in sightings]
                print(json.dumps({"asked": sample.name, "why": sample.why, "uid": uid, "seen": steps}))
            else:
                for line in _lines(sample, sightings, history.epochs):
                    _say(console, line)
    if out is not None and not as_json:
        _say(console, f"written: {out}: {counted(rendered, 'picture')}")


def _lines(sample: "NamedSample", sightings: Sequence["Sighting"], epochs: int) -> Iterator[str]:
    place = sample.place
    if place is None:
        unknown = "no stored image of the training data has these bytes; --near looks for copies"
        yield f"{sample.name}: never seen: {unknown}"
        return
    what = f"{sample.name} ({sample.why}): uid {place.uid}"
    if place.is_left_out:
        yield f"{what}: never seen: these data leave it out"
        return
    times_seen = [each for each in sightings if each.view == 0]  # all views of a sample are seen at once
    unused = sum(each.step is None for each in times_seen)
    times, more = counted(len(times_seen) - unused, "time"), f", and {counted(unused, 'time')} in batches left out"
    size = f"{place.width} x {place.height} pixels"
    yield f"{what}, {size}: seen {times} in {counted(epochs, 'epoch')}{more if unused else ''}"
    for each in sightings[:_SHOWN]:
        top, left, height, width = each.box
        step = "left out" if each.step is None else f"step {each.step:,}"
        how = (", mirrored" if each.is_flipped else "") + ("" if each.partner is None else f", with uid {each.partner}")
        how = (f", view {each.view}" if each.view else "") + how
        yield f"  {step}, epoch {each.epoch}, slot {each.slot}: {width} x {height} from ({left}, {top}){how}"
    if len(sightings) > _SHOWN:
        yield f"  and {len(sightings) - _SHOWN:,} more: --json has all"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
