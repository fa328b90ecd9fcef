"""`vitscale seen`: at which steps a run has seen an image, and how."""

import json
from collections.abc import Sequence
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
    from vitscale.about.checks.asked import Asked
    from vitscale.about.checks.seen import History, Sighting

_SHOWN = 20  # sightings of a sample that are printed
_RENDERED = 1000  # sightings of all samples together that are written as PNG


def seen(
    samples: Annotated[
        list[str], Argument(metavar="IMAGE|UID|LIST...", help="Images, folders, uids, lists of uids; - for a list.")
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
    from vitscale.about.checks.asked import asked_samples
    from vitscale.about.checks.seen import History

    history, rendered = History.of(run, root), 0
    if not as_json:
        unseen = f", {counted(history.left_out, 'batch')} left out" if history.left_out else ""
        say(
            f"{run}: {counted(history.steps, 'step')} up to its newest checkpoint{unseen}, in "
            f"{counted(history.epochs, 'epoch')} of {history.manifest.where}"
        )
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(new_folder(str(out), "--out"))
        all_asked = asked_samples(history, samples, copies_of if near else None)
        seen = iter(history.sightings([asked.place for asked in all_asked if asked.place is not None]))
        for asked in all_asked:
            sightings = [] if asked.place is None else next(seen)
            if folder is not None and asked.place is not None:
                rendered += len(sightings)
                if rendered > _RENDERED:
                    raise RecipeError(f"--out: more than {_RENDERED:,} pictures; ask for fewer samples")
                for sighting in sightings:
                    name = f"uid{asked.place.uid}-batch{sighting.batch}-slot{sighting.slot}.png"
                    Image.fromarray(history.pixels(sighting).images[0].numpy()).save(folder / name)
            if as_json:
                uid = None if asked.place is None else asked.place.uid
                times = [asdict(each) for each in sightings]
                print(json.dumps({"asked": asked.what, "why": asked.why, "uid": uid, "seen": times}))
            else:
                _show(asked, sightings, history)
    if out is not None and not as_json:
        say(f"written: {out}: {counted(rendered, 'picture')}")


def _show(asked: "Asked", sightings: Sequence["Sighting"], history: "History") -> None:
    place = asked.place
    if place is None:
        say(f"{asked.what}: never seen: no stored image of the training data has these bytes; --near looks for copies")
        return
    if place.is_left_out:
        say(f"{asked.what} ({asked.why}): uid {place.uid}: never seen: these data leave it out")
        return
    trained = [each for each in sightings if each.step is not None]
    skipped = f", and {counted(len(sightings) - len(trained), 'time')} in batches left out"
    say(
        f"{asked.what} ({asked.why}): uid {place.uid}, {place.width} x {place.height} pixels: seen "
        f"{counted(len(trained), 'time')} in {counted(history.epochs, 'epoch')}"
        + (skipped if trained != sightings else "")
    )
    for each in sightings[:_SHOWN]:
        top, left, height, width = each.box
        step = "left out" if each.step is None else f"step {each.step:,}"
        how = (", mirrored" if each.is_flipped else "") + ("" if each.partner is None else f", with uid {each.partner}")
        say(f"  {step}, epoch {each.epoch}, slot {each.slot}: {width} x {height} from ({left}, {top}){how}")
    if len(sightings) > _SHOWN:
        say(f"  and {len(sightings) - _SHOWN:,} more: --json has all")
