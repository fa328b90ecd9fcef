"""What `vitscale seen` does and prints."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from data_tools.images import ImageOptions, Reject, store_image
from vitscale.errors import DataError, RecipeError
from vitscale.files.durable import new_folder
from vitscale.images import crc32c
from vitscale.replay.seen import History, Place, Sighting
from vitscale.wording import counted

_SHOWN = 20  # sightings of a sample that are printed
_RENDERED = 1000  # of all samples together, as PNG


@dataclass(frozen=True)
class _Asked:
    """A sample of the dataset, and why it is shown: it was named, it is the image, or a copy of it."""

    what: str
    why: str
    place: Place | None


def show_seen(
    samples: Sequence[str], run: Path, out: Path | None, root: str | None, *, near: bool, as_json: bool
) -> None:
    """Print when each sample was seen. Raises `RecipeError`, `DataError`, `CheckpointError` and `StorageError`."""
    history = History.of(run, root)
    console, rendered = Console(), 0
    if not as_json:
        unseen = f", {history.batches - history.steps:,} left out" if history.batches > history.steps else ""
        _say(
            console,
            f"{run}: {counted(history.steps, 'step')} up to its newest checkpoint{unseen}, in "
            f"{counted(history.epochs, 'epoch')} of {history.manifest.where}",
        )
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(new_folder(str(out), "--out"))
        for asked in _asked(history, samples, near=near):
            sightings = [] if asked.place is None else list(history.sightings(asked.place))
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


def _asked(history: History, samples: Sequence[str], *, near: bool) -> Iterator[_Asked]:
    images = []
    for sample in samples:
        if sample.isdecimal() and not Path(sample).exists():
            yield _Asked(sample, "uid", history.find(int(sample)))
            continue
        images.append(Path(sample))
        found = False
        for place in _stored(history, images[-1]):
            found = True
            yield _Asked(sample, "the image itself", place)
        if not found and not near:
            yield _Asked(sample, "not in the data", None)
    if near:
        if not images:
            raise RecipeError(
                "--near is of files of images; for a uid, export the picture first: vitscale shards export"
            )
        yield from _copies(history, images)


def _stored(history: History, file: Path) -> Iterator[Place]:
    """Where the image lies as conversion stored it. Raises `DataError` for what is no image."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}; expected a file, or a uid") from None
    options = history.manifest.options
    stored = store_image(
        content,
        ImageOptions(
            short_side=options.get("short_side"),
            long_side=options.get("long_side"),
            quality=options.get("jpeg_quality", ImageOptions.quality),
            pass_through=options.get("pass_through", True),
        ),
    )
    if isinstance(stored, Reject):
        raise DataError(f"{file}: {stored.reason}")
    return history.holding(stored.jpeg, crc32c(stored.jpeg))


def _copies(history: History, images: Sequence[Path]) -> Iterator[_Asked]:
    """Samples that de-duplication takes for copies of the images."""
    from data_tools.conversion import Machine
    from data_tools.dedup.building import TestSource, build_index
    from data_tools.dedup.finding import find
    from data_tools.sources import SourceOptions, open_source
    from vitscale.shards.decisions import DECISIONS_NAME, read_decisions

    with tempfile.TemporaryDirectory(prefix="vitscale-") as temporary:
        listed, index, found = (Path(temporary, name) for name in ("images.jsonl", "index", "found"))
        listed.write_text("".join(json.dumps({"path": str(image.absolute())}) + "\n" for image in images))
        source = open_source(str(listed), "list", SourceOptions(unlabelled=True))
        build_index([TestSource("asked", str(listed), source)], index, workers=1)
        where = history.manifest.where
        find(where, [str(index)], str(found), Machine(None).runner(where))
        rows = [row for row in read_decisions(found / DECISIONS_NAME).to_pylist() if row["removed"]]
    for row in rows:
        yield _Asked(row["test_key"], f"a copy by {row['tier']}", history.find(row["train_uid"]))


def _render(history: History, place: Place, sighting: Sighting, folder: Path) -> None:
    batch = history.pixels(sighting)
    name = f"uid{place.uid}-batch{sighting.batch}-slot{sighting.slot}.png"
    Image.fromarray(batch.images[0].numpy()).save(folder / name)


def _plain(asked: _Asked, sightings: Sequence[Sighting]) -> dict[str, Any]:
    uid = None if asked.place is None else asked.place.uid
    return {"asked": asked.what, "why": asked.why, "uid": uid, "seen": [asdict(each) for each in sightings]}


def _show(console: Console, asked: _Asked, sightings: Sequence[Sighting], history: History) -> None:
    if asked.place is None:
        _say(
            console,
            f"{asked.what}: never seen: no stored image of the training data has these bytes; --near looks for copies",
        )
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
