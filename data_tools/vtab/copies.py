"""Finds local copies of the tasks' datasets, in any of three layouts below the folders that the user names.

    NAME/VERSION/NAME-train.tfrecord-00000-of-00004    TensorFlow Datasets (TFDS); with a configuration NAME/CONFIG/...
    wds_vtab-NAME/train/0.tar, test/0.tar              WebDataset tars of CLIP_benchmark
    NAME/train/CLASS/image.png, test/...               folders of classes

Only TFDS's own records yield the published images by themselves. From the others the same slices are
taken in the copy's own order, and a list of ids is needed to get the published images.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from data_tools.classes import SPLIT_NAMES
from data_tools.vtab.tasks import ORIGINS, Slice, folder_names
from vitscale.ground.errors import DataError

Layout = Literal["tfds", "tars", "folders"]

_VERSION = re.compile(r"\d+\.\d+\.\d+")
_RECORDS = re.compile(r".+-(?P<split>\w+)\.tfrecord-(?P<index>\d{5})-of-(?P<count>\d{5})")
_TFDS_NAMES = {"train": "train", "val": "validation", "test": "test"}


class Copy(NamedTuple):
    """A copy of a task's dataset."""

    task: str
    layout: Layout
    folder: Path
    files: Mapping[str, tuple[Path, ...]]  # of each split, in order; for class folders the split's folder
    train: Slice  # this and the next two: the slices of these splits that make up the task's parts
    val: Slice
    test: Slice
    version: str | None = None  # the TFDS version; None for other layouts
    doubt: str | None = None  # why these are not the published images, unless a list of ids selects them, if so


class Search(NamedTuple):
    """The result of looking for a task: a copy or None, the places searched, and problems of unusable copies there."""

    copy: Copy | None
    looked: tuple[Path, ...]
    problems: tuple[str, ...]


def find_copy(task: str, folders: Sequence[Path]) -> Search:
    """The first copy of a task's dataset in the folders, in the order of layouts above."""
    looked: list[Path] = []
    problems: list[str] = []
    origin = ORIGINS[task]
    finders: tuple[tuple[Callable[[str, Path], Copy | None], Sequence[str]], ...] = (
        (_tfds, (origin.tfds,)),
        (_tars, (f"wds_vtab-{origin.tars or task}",)),
        (_class_folders, folder_names(task)),
    )
    for finder, names in finders:
        for place in (place for folder in folders for place in _places(folder, names)):
            looked.append(place)
            try:
                copy = finder(task, place) if place.is_dir() else None
            except (DataError, OSError) as error:
                problems.append(str(error))
                continue
            if copy is not None:
                return Search(copy, tuple(looked), tuple(problems))
    return Search(None, tuple(dict.fromkeys(looked)), tuple(problems))


def _tfds(task: str, place: Path) -> Copy | None:
    origin = ORIGINS[task]
    versions = [path for path in place.iterdir() if _VERSION.fullmatch(path.name)]
    if not versions:
        return None
    expected = [path for path in versions if f"{path.name}.".startswith(f"{origin.version}.")]
    folder = max(expected or versions, key=lambda path: [int(number) for number in path.name.split(".")])
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for path in folder.iterdir():
        if match := _RECORDS.fullmatch(path.name):
            files[match["split"]][int(match["index"])] = path
            counts[match["split"]] = int(match["count"])
    slices = (origin.train, origin.val, origin.test)
    needed = sorted({part.split for part in slices})
    for split in needed:
        missing = [index for index in range(counts.get(split, 1)) if index not in files.get(split, {})]
        if missing:
            what = f"lacks {len(missing)} of {counts[split]} files" if split in counts else "has no .tfrecord files"
            raise DataError(f"{folder}: {what} of the split {split}")
    in_order = {split: tuple(files[split][index] for index in sorted(files[split])) for split in needed}
    doubt = None if expected else f"version {folder.name}: the order of its images is not that of {origin.version}"
    return Copy(task, "tfds", folder, in_order, *slices, folder.name, doubt)


def _tars(task: str, place: Path) -> Copy | None:
    files = {
        split: tuple(sorted((place / name).glob("*.tar"), key=lambda path: (len(path.name), path.name)))
        for name, split in _split_folders(place).items()
    }
    return _cut(task, "tars", place, files)


def _class_folders(task: str, place: Path) -> Copy | None:
    files = {
        split: (place / name,)
        for name, split in _split_folders(place).items()
        if any(path.is_dir() and not path.name.startswith(".") for path in (place / name).iterdir())
    }
    return _cut(task, "folders", place, files)


def _cut(task: str, layout: Layout, place: Path, files: Mapping[str, tuple[Path, ...]]) -> Copy | None:
    """A copy that is already cut into VTAB's parts, each of them a split."""
    files = {split: paths for split, paths in files.items() if paths}
    if not files:
        return None
    if missing := [split for split in ("train", "test") if split not in files]:
        raise DataError(f"{place}: {layout} without the split {' and '.join(missing)}; found {', '.join(files)}")
    val = Slice("validation" if "validation" in files else "train")  # which then follows the training images
    return Copy(task, layout, place, files, Slice("train"), val, Slice("test"), doubt="an order of its own")


def _split_folders(place: Path) -> dict[str, str]:
    """Folders named like splits, and the split of each."""
    named = ((path.name, SPLIT_NAMES.get(path.name.lower())) for path in sorted(place.iterdir()) if path.is_dir())
    return {name: _TFDS_NAMES[split] for name, split in named if split is not None}


def _places(folder: Path, names: Sequence[str]) -> list[Path]:
    own = folder.absolute().as_posix()
    return [folder / name for name in names] + ([folder] if own.endswith(tuple(f"/{name}" for name in names)) else [])
