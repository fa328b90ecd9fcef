"""The samples that people name: by uids, image files, folders, and lists of these."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from vitscale.about.checks.seen import Content, History, SampleLocation
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions, Reject, store_image
from vitscale.evaluation.prediction import image_files
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.storage import read_bytes, read_text, regular
from vitscale.ground.wording import counted, listed

_NAMED = 20  # uids in a message
_HEAD = 4096  # bytes of a file that are enough to tell a list from an image

Near = Callable[[Sequence[Path], str], Sequence[tuple[str, int, str]]]
"""(files of images, a dataset's path or URL) -> the file, the copy's uid and the rule that found it, for each copy."""


class NamedSample(NamedTuple):
    """What a person named, why a sample is shown for it, and the sample's place; None if there is no such sample."""

    name: str
    why: str
    place: SampleLocation | None


def named_samples(history: History, names: Sequence[str], near: Near | None) -> list[NamedSample]:
    """The samples that were named, in that order, followed by the copies of the images that `near`, if any, finds.

    Names are uids, image files, folders of these, text files with a uid or a file per line, or `-` for such lines on
    standard input. Raises `DataError` for unknown uids, files that are neither images nor lists, and if nothing is
    named; `RecipeError` for `near` without an image; `StorageError`.
    """
    entries = [entry for name in names for entry in _entries(name)]
    if not entries:
        raise DataError(f"{', '.join(names)}: nothing is named there; expected a uid or a file of an image a line")
    uids = [entry for entry in entries if isinstance(entry, int)]
    images = list(dict.fromkeys(entry for entry in entries if isinstance(entry, Path)))
    if near and not images:
        raise RecipeError("--near is of files of images; for a uid, export the picture first: vitscale shards export")
    of_uid = dict(zip(uids, history.find(uids), strict=True))
    if unknown := sorted(uid for uid, place in of_uid.items() if place is None):
        named = f"{counted(len(unknown), 'uid')} that were named: {listed(unknown, _NAMED)}"
        raise DataError(f"{history.manifest.where} has no sample of {named}")
    of_image: dict[Path, list[SampleLocation]] = {image: [] for image in images}
    for which, place in history.holding([_content(history, image) for image in images]):
        of_image[images[which]].append(place)
    samples: list[NamedSample] = []
    for entry in dict.fromkeys(entries):
        if isinstance(entry, int):
            samples.append(NamedSample(str(entry), "uid", of_uid[entry]))
            continue
        samples += [NamedSample(str(entry), "the image itself", place) for place in of_image[entry]]
        if not of_image[entry] and not near:
            samples.append(NamedSample(str(entry), "not in the data", None))
    if near is not None:
        copies = near(images, history.manifest.where)
        pairs = zip(copies, history.find([uid for _, uid, _ in copies]), strict=True)
        samples += [NamedSample(image, f"a copy by {rule}", place) for (image, _, rule), place in pairs]
    return samples


def _entries(name: str) -> Iterator[int | Path]:
    """The uids and image files that one argument of the command line names."""
    path = Path(name)
    if name == "-":
        yield from _lines(sys.stdin.read(), "standard input")
    elif name.isdecimal() and len(name) < 100 and not path.exists():
        yield int(name)
    elif os.path.isdir(path):  # noqa: PTH112 (of any text)
        yield from image_files([path])
    elif _is_list(path):
        with turned(f"{name}: cannot be read", DataError, OSError, UnicodeDecodeError):
            yield from _lines(read_text(path), name)
    else:
        yield path


def _is_list(path: Path) -> bool:
    if path.name.lower().endswith(IMAGE_SUFFIXES):
        return False
    try:
        with FileIO(path, opener=regular) as file:
            head = file.read(_HEAD)
    except OSError:
        return False  # the error comes up when the file is read
    return b"\0" not in head and all(byte >= 32 or byte in b"\t\r\n" for byte in head)


def _lines(text: str, where: str) -> Iterator[int | Path]:
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        if entry.isdecimal() and len(entry) < 100:
            yield int(entry)
        elif os.path.isfile(entry):  # noqa: PTH113 (of any text)
            yield Path(entry)
        else:
            raise DataError(f"{where}: line {number}: {entry[:200]!r}: expected a uid, or a file of an image")


def _content(history: History, file: Path) -> Content:
    """The identity of an image's bytes as conversion would store them. Raises `DataError` if it is not an image."""
    try:
        content = read_bytes(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}; expected a file, or a uid") from None
    recorded = history.manifest.options
    options = ImageOptions(
        short_side=recorded.get("short_side"),
        long_side=recorded.get("long_side"),
        quality=recorded.get("jpeg_quality", ImageOptions.quality),
        pass_through=recorded.get("pass_through", True),
    )
    stored = store_image(content, options)
    if isinstance(stored, Reject):
        raise DataError(f"{file}: {stored.reason}")
    return Content.of(stored.jpeg)
