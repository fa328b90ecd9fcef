"""Prepares a task of VTAB-1k: one conversion of its 1,000 images with a view of each part, and one of its test images.

OUT/TASK/ids.json            which images the small parts have
OUT/TASK/train800val200/     the 1,000 images, for the final run
OUT/TASK/train800/, val200/  manifests over them, for choosing
OUT/TASK/test/               the whole test part

    ids.json    {"version": 1, "task": ..., "source": ..., "slices": ..., "train800": [{"key", "label", "sha256"}], ...}

A list of ids pins images by the SHA-256 of their pixels. The order of TFDS depends on its version, other copies have
orders of their own, and images may have been re-encoded. The pixels stay the same: uint8 RGB, row by row, EXIF
orientation applied, JPEGs decoded as libjpeg does with its accurate integer transform, gray repeated three times.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

from data_tools.conversion import convert, disk_errors
from data_tools.machine import Machine
from data_tools.request import Request
from data_tools.views import write_view
from data_tools.vtab.copies import Search, find_copy
from data_tools.vtab.source import FoundImage, OpenCopy, PartSource, open_copy
from data_tools.vtab.tasks import Takes
from vitscale.data.shards import MANIFEST_NAME, Manifest
from vitscale.data.shards.images import ImageOptions, Reject, store_image
from vitscale.data.shards.manifest import Sha256, Strict
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError, RecipeError, turned
from vitscale.ground.files.durable import write_text
from vitscale.ground.storage import read_text
from vitscale.ground.table import Console
from vitscale.ground.wording import describe_mistake

IDS_NAME = "ids.json"
SMALL, TEST = "train800val200", "test"
VIEWS = ("train800", "val200")
DATASETS = (SMALL, *VIEWS, TEST)

_QUALITY = 100  # most tasks have PNGs, which shards hold as JPEGs: lose as little as possible
_TAKES = Takes()

Rows = Mapping[str, Sequence[int]]  # numbers of images, ascending, by split


class PinnedImage(Strict):
    """One image: its key in the copy that it was taken from, its class number, the SHA-256 of its pixels."""

    key: str
    label: Annotated[int, Field(ge=0)]
    sha256: Sha256

    @property
    def content(self) -> tuple[str, int]:
        """Identifies the image in any copy; with the label, because dSprites has equal pictures with different ones."""
        return self.sha256, self.label


class Ids(Strict):
    """The images of a task's two small parts, and a description of their origin."""

    version: Literal[1] = 1
    task: str
    source: str
    slices: dict[str, str]
    train800: tuple[PinnedImage, ...]
    val200: tuple[PinnedImage, ...]

    @property
    def parts(self) -> dict[str, tuple[PinnedImage, ...]]:
        """The entries of each part, by its name."""
        return {"train800": self.train800, "val200": self.val200}

    @property
    def sha256(self) -> str:
        """Digest of pixels and labels of both parts: equal for equal images from any copy."""
        lines = [
            f"{name} {sha} {label}"
            for name, part in self.parts.items()
            for sha, label in sorted(contents(part).elements())
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def differences(self, other: "Ids") -> int:
        """How many images of this list are not in the same part of the other."""
        return sum((contents(part) - contents(other.parts[name])).total() for name, part in self.parts.items())

    @classmethod
    def read(cls, path: Path) -> "Ids":
        """The list in a file. Raises RecipeError if it cannot be read, DataError if it is damaged."""
        try:
            ids = cls.model_validate_json(read_text(path))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: no text in UTF-8 ({error})") from error
        except OSError as error:
            raise RecipeError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValidationError as error:
            reason = describe_mistake(error.errors(include_url=False)[0])
            raise DataError(f"{path}: not a list of ids: {reason}") from error
        keys = Counter(entry.key for part in ids.parts.values() for entry in part)
        if repeated := [key for key, count in keys.items() if count > 1]:
            raise DataError(f"{path}: names {len(repeated)} images twice, such as {repeated[0]!r}")
        return ids


def entries_of(source: PartSource) -> Iterator[PinnedImage]:
    """The images of a part as entries, each decoded. Raises DataError for one that cannot be."""
    for part, name in enumerate(source.parts):
        for item in source.items(part, Counter()):
            with turned(f"{name}: {item.key!r}", DataError, OSError, DataError):
                digest = pixels_sha256(source.read(part, item.content))
            yield PinnedImage(key=item.key, label=source.label_of(item), sha256=digest)


def pixels_sha256(image: bytes) -> str:
    """SHA-256 of an image file's pixels. Raises DataError if it cannot be decoded."""
    stored = store_image(image)
    if isinstance(stored, Reject):
        raise DataError(stored.reason)
    return hashlib.sha256(stored.pixels.tobytes()).hexdigest()


def contents(entries: Iterable[PinnedImage]) -> Counter[tuple[str, int]]:
    """How often each image, by `PinnedImage.content`, is among these."""
    return Counter(entry.content for entry in entries)


class Prepared(NamedTuple):
    """The result of preparing a task."""

    task: str
    search: Search | None  # for a copy; None if the datasets were already there
    counts: Mapping[str, int]  # number of images in each dataset; empty if no copy was found
    doubt: str | None = None  # why the 1,000 are not the published ones; None if they are, or a list of ids chose them


def prepare(
    task: str,
    folders: Sequence[Path],
    out: Path,
    machine: Machine,
    console: Console,
    pinned: Ids | None = None,
    takes: Takes = _TAKES,
) -> Prepared:
    """Prepare one task in OUT/TASK, or continue doing so, from a copy in one of the folders.

    With `pinned`, a list of ids, the small parts have exactly these images, otherwise as many as `takes` says.

    Raises:
        DataError: a copy that is damaged, too small, or without the images of `pinned`.
        RecipeError: other images are there already.
    """
    place = out / task
    if all((place / name).is_file() for name in (IDS_NAME, *(f"{one}/{MANIFEST_NAME}" for one in DATASETS))):
        there = Ids.read(place / IDS_NAME)
        if pinned is not None and (others := pinned.differences(there) + there.differences(pinned)):
            raise RecipeError(
                f"{place}: was prepared with other images ({others:,} differ). Choose another OUT, or remove this one"
            )
        return Prepared(task, None, _counts(place))
    search = find_copy(task, folders)
    if search.copy is None:
        return Prepared(task, search, {})
    with disk_errors(str(place)):
        opened = open_copy(search.copy)
        small, test = chosen_rows(opened, takes, pinned)
        ids = _list_of(opened, small, pinned)
        _write_list(place, ids)
        strict = Machine(machine.workers, work=machine.work, max_reject_rate=0.0)
        slices = " and ".join(ids.slices[part] for part in VIEWS)
        for name, rows, what in (
            (SMALL, _joined(small.values()), f"{slices}, sha256 {ids.sha256}"),
            (TEST, test, ids.slices[TEST]),
        ):
            words = f"{task}: {what} of {ids.source}"
            request = Request(src=str(search.copy.folder), images=ImageOptions(quality=_QUALITY), taken=words)
            convert(request, place / name, strict, console, source=opened.part(rows))
        for name in VIEWS:
            _write_view(place, name, {entry.key for entry in ids.parts[name]})
    return Prepared(task, search, _counts(place), None if pinned is not None else search.copy.doubt)


def chosen_rows(opened: OpenCopy, takes: Takes, pinned: Ids | None) -> tuple[dict[str, Rows], Rows]:
    """The images of the two small parts, by name, and those of the test part.

    Raises DataError if there are too few images, if one would be in two parts, or if `pinned` names others.
    """
    copy = opened.copy
    test: Rows = {copy.test.split: copy.test.rows(opened.size(copy.test.split))}
    small: dict[str, Rows] = {}
    if pinned is not None:
        small = _located(opened, pinned, test)
    else:
        for name, part, skipped, count in (
            ("train800", copy.train, 0, takes.train),
            ("val200", copy.val, takes.train if copy.val == copy.train else 0, takes.val),  # follows the other part
        ):
            size = opened.size(part.split)
            small[name] = {part.split: part.rows(size)[skipped : skipped + count]}
            if len(small[name][part.split]) != count:
                raise DataError(f"{copy.folder}: {part.split} has {size:,} images; too few for the {count} of {name}")
    numbers = Counter((split, row) for rows in (*small.values(), test) for split, row in _numbers(rows))
    if repeated := sum(count > 1 for count in numbers.values()):
        raise DataError(f"{copy.folder}: too few images: {repeated:,} would be in two of the parts")
    if not test[copy.test.split]:
        raise DataError(f"{copy.folder}: no images for testing in the split {copy.test.split}")
    return small, test


def _located(opened: OpenCopy, pinned: Ids, test: Rows) -> dict[str, Rows]:
    """Places of a list's images: by keys or, if some keys are missing or belong to other images, by pixels."""
    kept_apart = set(_numbers(test))
    splits = dict.fromkeys((opened.copy.train.split, opened.copy.val.split))

    def pool() -> Iterator[FoundImage]:  # iterated anew each time: images may carry their bytes
        return (found for found in opened.items(splits) if (found.split, found.number) not in kept_apart)

    places = {found.key: [(found.split, found.number)] for found in pool()}
    if all(entry.key in places for entries in pinned.parts.values() for entry in entries):
        located = {part: _rows(places, [entry.key for entry in entries]) for part, entries in pinned.parts.items()}
        if all(contents(entries_of(opened.part(located[part]))) == contents(pinned.parts[part]) for part in located):
            return located
    by_content: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for found in pool():
        by_content[pixels_sha256(found.read()), found.label].append((found.split, found.number))
    missing = contents([entry for entries in pinned.parts.values() for entry in entries])
    missing -= Counter({content: len(there) for content, there in by_content.items()})
    if missing:
        raise DataError(
            f"{opened.copy.folder}: {missing.total():,} of the images in the list of ids are not there, by pixels and "
            "label. Use the copy that the list was made of, or leave out --ids"
        )
    return {part: _rows(by_content, [entry.content for entry in entries]) for part, entries in pinned.parts.items()}


def _rows(places: Mapping[Any, list[tuple[str, int]]], names: Iterable[Any]) -> Rows:
    """Places of the images with these names; of several with the same name, the first not yet used."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        split, number = places[name].pop(0)
        numbers[split].append(number)
    return {split: sorted(here) for split, here in numbers.items()}


def _list_of(opened: OpenCopy, small: Mapping[str, Rows], pinned: Ids | None) -> Ids:
    copy = opened.copy
    source = copy.layout if copy.version is None else f"{copy.layout} {copy.version}"
    if pinned is None:
        parts = (("train800", copy.train, small["train800"]), ("val200", copy.val, small["val200"]))
        slices = {name: _described(part.split, rows[part.split], opened) for name, part, rows in parts}
    else:
        slices = dict.fromkeys(VIEWS, "a list of ids")
    test = copy.test.rows(opened.size(copy.test.split))
    return Ids(
        task=copy.task,
        source=source,
        slices=slices | {TEST: _described(copy.test.split, test, opened)},
        train800=tuple(entries_of(opened.part(small["train800"]))),
        val200=tuple(entries_of(opened.part(small["val200"]))),
    )


def _write_list(place: Path, ids: Ids) -> None:
    """Write the list of ids, unless it exists. Raises RecipeError if a different one does."""
    if not (place / IDS_NAME).exists():
        place.mkdir(parents=True, exist_ok=True)
        write_text(place / IDS_NAME, ids.model_dump_json(indent=1) + "\n")
    elif Ids.read(place / IDS_NAME) != ids:
        raise RecipeError(
            f"{place}: was started with other images or from another copy. Choose another OUT, or remove this one"
        )


def _described(split: str, rows: Sequence[int], opened: OpenCopy) -> str:
    return split if len(rows) == opened.size(split) else f"{split}[{rows[0]}:{rows[-1] + 1}]"


def _joined(parts: Iterable[Rows]) -> Rows:
    joined: dict[str, list[int]] = defaultdict(list)
    for split, row in sorted(number for rows in parts for number in _numbers(rows)):
        joined[split].append(row)
    return joined


def _numbers(rows: Rows) -> Iterator[tuple[str, int]]:
    return ((split, row) for split, of_split in rows.items() for row in of_split)


def _counts(place: Path) -> dict[str, int]:
    return {name: Manifest.load(place / name).num_samples for name in DATASETS}


def _write_view(place: Path, name: str, keys: set[str]) -> None:
    """Write a manifest of the samples with these keys, unless there is a complete one."""
    folder = place / name
    if (folder / MANIFEST_NAME).exists():
        return
    if folder.is_dir():
        for path in folder.glob("*.excluded.npy"):  # from an attempt that was killed
            path.unlink()
    whole = Manifest.load(place / SMALL)

    def kept() -> Iterator[tuple[int, np.ndarray]]:
        for index in range(len(whole.shards)):
            with open_shard(whole, index) as shard:
                assert shard.keys is not None
                slots = np.array([slot for slot in shard.slots.tolist() if shard.keys[slot] in keys], np.int64)
            if len(slots):
                yield index, slots

    write_view(whole, str(folder), kept())
