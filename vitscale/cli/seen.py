"""`vitscale seen`: at which steps a run has seen an image, and how."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from vitscale.cli.console import say
from vitscale.cli.options import DataRoot
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from vitscale.about.checks.named_samples import NamedSample
    from vitscale.about.checks.seen import Sighting

_SHOWN = 20  # sightings of a sample that are printed
_RENDERED = 1000  # sightings of all samples together that are written as PNG


def seen(
    samples: Annotated[
        list[str],
        Argument(metavar="IMAGE|UID|LIST...", help="Images, folders, uids, lists of uids; - for a list."),
    ],
    run: Annotated[Path, Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="New folder for the pixels that were seen, as PNG.")
    ] = None,
    near: Annotated[
        bool, Option("--near", help="Find copies of the images, too, as `vitscale dedup` does: reads all data.")
    ] = False,
    root: DataRoot = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per sample.")] = False,
) -> None:
    """Say at which steps a run has seen an image, and with which crop."""
    from PIL import Image

    from data_tools.dedup.near import copies_of
    from vitscale.about.checks.named_samples import named_samples
    from vitscale.about.checks.seen import History

    history, rendered = History(run, root), 0
    if not as_json:
        unseen = f", {counted(history.left_out, 'batch')} left out" if history.left_out else ""
        say(
            f"{run}: {counted(history.steps, 'step')} up to its newest checkpoint{unseen}, in "
            f"{counted(history.epochs, 'epoch')} of {history.manifest.where}"
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
                    picture = Image.fromarray(history.pixels(each).images[0].numpy())
                    picture.save(folder / f"uid{uid}-batch{each.batch}-slot{each.slot}.png")
            if as_json:
                steps = [asdict(each) for each in sightings]
                print(json.dumps({"asked": sample.name, "why": sample.why, "uid": uid, "seen": steps}))
            else:
                for line in _lines(sample, sightings, history.epochs):
                    say(line)
    if out is not None and not as_json:
        say(f"written: {out}: {counted(rendered, 'picture')}")


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
    unused = sum(each.step is None for each in sightings)
    times, more = counted(len(sightings) - unused, "time"), f", and {counted(unused, 'time')} in batches left out"
    size = f"{place.width} x {place.height} pixels"
    yield f"{what}, {size}: seen {times} in {counted(epochs, 'epoch')}{more if unused else ''}"
    for each in sightings[:_SHOWN]:
        top, left, height, width = each.box
        step = "left out" if each.step is None else f"step {each.step:,}"
        how = (", mirrored" if each.is_flipped else "") + ("" if each.partner is None else f", with uid {each.partner}")
        yield f"  {step}, epoch {each.epoch}, slot {each.slot}: {width} x {height} from ({left}, {top}){how}"
    if len(sightings) > _SHOWN:
        yield f"  and {len(sightings) - _SHOWN:,} more: --json has all"
