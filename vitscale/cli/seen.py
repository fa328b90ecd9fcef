"""`vitscale seen`: at which steps a run has seen an image, and how."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.table import Console
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from vitscale.about.checks.asked import Asked
    from vitscale.about.checks.seen import History, SampleLocation, Sighting

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
    from data_tools.dedup.near import copies_of
    from vitscale.about.checks.asked import asked_samples
    from vitscale.about.checks.seen import History

    history = History.of(run, root)
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
        all_asked = asked_samples(history, samples, copies_of if near else None)
        seen = iter(history.sightings([asked.place for asked in all_asked if asked.place is not None]))
        for asked in all_asked:
            sightings = [] if asked.place is None else next(seen)
            if folder is not None and asked.place is not None:
                rendered += len(sightings)
                if rendered > _RENDERED:
                    raise RecipeError(f"--out: more than {_RENDERED:,} pictures; ask for fewer samples")
                for sighting in sightings:
                    _render(history, asked.place, sighting, folder)
            if as_json:
                print(json.dumps(_plain(asked, sightings)))
            else:
                _show(console, asked, sightings, history)
    if out is not None and not as_json:
        _say(console, f"written: {out}: {counted(rendered, 'picture')}")


def _render(history: "History", place: "SampleLocation", sighting: "Sighting", folder: Path) -> None:
    from PIL import Image

    batch = history.pixels(sighting)
    name = f"uid{place.uid}-batch{sighting.batch}-slot{sighting.slot}.png"
    Image.fromarray(batch.images[0].numpy()).save(folder / name)


def _plain(asked: "Asked", sightings: Sequence["Sighting"]) -> dict[str, Any]:
    uid = None if asked.place is None else asked.place.uid
    return {"asked": asked.what, "why": asked.why, "uid": uid, "seen": [asdict(each) for each in sightings]}


def _show(console: Console, asked: "Asked", sightings: Sequence["Sighting"], history: "History") -> None:
    if asked.place is None:
        _say(
            console,
            f"{asked.what}: never seen: no stored image of the training data has these bytes; --near looks for copies",
        )
        return
    if asked.place.is_left_out:
        _say(console, f"{asked.what} ({asked.why}): uid {asked.place.uid}: never seen: these data leave it out")
        return
    trained = [each for each in sightings if each.step is not None]
    _say(
        console,
        f"{asked.what} ({asked.why}): uid {asked.place.uid}, {asked.place.width} x {asked.place.height} pixels: seen "
        f"{counted(len(trained), 'time')} in {counted(history.epochs, 'epoch')}"
        + (
            f", and {counted(len(sightings) - len(trained), 'time')} in batches left out"
            if trained != sightings
            else ""
        ),
    )
    for each in sightings[:_SHOWN]:
        top, left, height, width = each.box
        step = "left out" if each.step is None else f"step {each.step:,}"
        how = (", mirrored" if each.is_flipped else "") + ("" if each.partner is None else f", with uid {each.partner}")
        _say(
            console,
            f"  {step}, epoch {each.epoch}, slot {each.slot}: {width} x {height} from ({left}, {top}){how}",
        )
    if len(sightings) > _SHOWN:
        _say(console, f"  and {len(sightings) - _SHOWN:,} more: --json has all")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
