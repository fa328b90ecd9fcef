"""`vitscale seen` and `without`: when a run has seen an image, and branches of it that never have."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vitscale.cli.console import say
from vitscale.cli.options import DataRoot, Json
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted

if TYPE_CHECKING:
    from vitscale.about.checks.named_samples import NamedSample
    from vitscale.about.checks.seen import Sighting

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
        named = named_samples(history, samples, _copies_of(near))
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
                for line in _sightings(sample, sightings, history.epochs):
                    say(line)
    if out is not None and not as_json:
        say(f"written: {out}: {counted(rendered, 'picture')}")


def _sightings(sample: "NamedSample", sightings: Sequence["Sighting"], epochs: int) -> Iterator[str]:
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


def without(
    samples: Annotated[
        list[str],
        Argument(
            metavar="LIST|UID|IMAGE...", help="What to leave out: lists of uids, uids, images, folders; - for a list."
        ),
    ],
    run: Annotated[Path, Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        str | None, Option(metavar="FOLDER", help="New: for the dataset without them (a view) and the branch's recipe.")
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
    from data_tools.views import write_without
    from vitscale.about.checks.without import leave_out  # which loads torch

    found = leave_out(samples, run, out, root, write_without, _copies_of(near))
    if as_json:
        print(json.dumps(found))
    else:
        print(*_leaving_out(found), sep="\n")


def _copies_of(near: bool) -> Callable[[Sequence[Path], str], list[tuple[str, int, str]]] | None:
    """What finds copies, if they are wanted: importing it takes seconds."""
    if not near:
        return None
    from data_tools.dedup.finding import copies_of

    return copies_of


def _leaving_out(found: dict[str, Any]) -> Iterator[str]:
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
