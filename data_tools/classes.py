"""Class names: collected while images are quoted, numbered once all are known.

Where folders are the labels, leading directories that all paths share are stripped, as long as every path keeps one;
the next directory is the class. The rest of the path is the image's key, so a tar with `train/cat/1.jpg` and a folder
with `cat/1.jpg` give equal datasets.
"""

import heapq
import json
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import read_text
from vitscale.ground.wording import counted, quoted, ranges, shortened

_MAX_NUMBER = 10_000_000
_MAX_CHARACTERS = 1000  # of a name; to normalize n combining marks takes n² steps
_SHOWN = 20
_EXAMPLES = 5
# Common names of splits, and which of them mean the same.
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "minival", "dev", "eval", "evaluation", "holdout"), "val"),
    **dict.fromkeys(("test", "testing", "test_dev"), "test"),
}
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})(\.0+)?")  # 3.0: what integers become in a table with missing values


class Vocabulary:
    """Class names in the order of their first appearance; a name's position is its provisional number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def number(self, name: str) -> int:
        """The provisional number of a class; a new class gets the next one."""
        if name not in self._numbers:
            _refuse(name)
        number = self._numbers.setdefault(name, len(self._numbers))
        if number > _MAX_NUMBER:
            raise DataError(
                f"more than {_MAX_NUMBER:,} different labels, such as {self.names[0]!r} and {name!r}: "
                "are these captions? Choose another field with --label-field"
            )
        return number


def _refuse(name: str) -> None:
    """Raise DataError for a name that is too long, or would be stored without what looks like a secret in it."""
    if len(name) > _MAX_CHARACTERS:
        raise DataError(
            f"a label of {len(name):,} characters, {name[:100]!r}...: are these captions? Expected at most "
            f"{_MAX_CHARACTERS:,}; choose another field with --label-field"
        )
    if any(without_secrets(text) != text for text in (name, json.dumps(name))):
        raise DataError(f"the label {without_secrets(name)!r} held what looks like a password or token; rename it")


def order_classes(
    names: list[str], stated: tuple[str, ...] | None, known: tuple[str, ...] | None, *, from_folders: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Number the classes.

    Args:
        names: the class names that occur.
        stated: all classes in order, as given by the source.
        known: all classes in order, as given by the user; overrides `stated`.
        from_folders: whether names are folder names, which are sorted by code point. Otherwise, if all names are
            numbers, they are the class numbers themselves.

    Returns all class names by label, and the label of each of `names`, int32. Raises DataError if a class is not in the
    given order, a name is too long, or only some of the names are numbers.
    """
    order = known or stated
    numbers = [] if from_folders else [int(float(name)) for name in names if _NUMBER.fullmatch(name)]
    are_numbers = bool(numbers) and len(numbers) == len(names)
    if order is None and are_numbers:
        if max(numbers) >= _MAX_NUMBER:
            raise DataError(f"labels go up to {max(numbers):,}: are these class numbers? Give names with --classes")
        return tuple(map(str, range(max(numbers) + 1))), np.array(numbers, np.int32)
    if order is None and numbers:
        others = [name for name in names if not _NUMBER.fullmatch(name)]
        raise DataError(
            f"labels are numbers except for {shortened(quoted(others, _SHOWN))}. Expected numbers or names "
            "throughout; --classes FILE if these are names of classes"
        )
    order = tuple(sorted(names)) if order is None else order
    for name in order:
        _refuse(name)
    label_of = {name: label for label, name in enumerate(order)}
    if are_numbers and not label_of.keys() & set(names) and max(numbers) < len(order):
        return order, np.array(numbers, np.int32)
    unknown = sorted(name for name in names if name not in label_of)
    if unknown:
        where = "--classes" if known else "the source's own list of classes"
        shown = shortened(quoted(unknown, _SHOWN))
        raise DataError(f"{len(unknown)} of {len(names)} classes of the source are not in {where}: {shown}")
    return order, np.array([label_of[name] for name in names], np.int32)


def class_notes(names: Sequence[str], empty: list[int]) -> list[str]:
    """Likely mistakes, one line each: a single class, classes without images (`empty`), names that look alike."""
    notes = []
    if len(names) == 1:
        notes.append(f"{names[0]!r} is the only class")
    if empty:
        notes.append(f"{len(empty):,} of {counted(len(names), 'class')} have no image: labels {ranges(empty)}")
    forms = _alike(names, lambda name: unicodedata.normalize("NFC", name))
    cases = _alike(names, lambda name: unicodedata.normalize("NFC", name).casefold())
    for what, alike, shown in (
        ("their Unicode form", forms, ascii),
        ("upper and lower case", [group for group in cases if group not in forms], repr),
    ):
        if alike:
            more = f"; and {len(alike) - 1:,} more such" if len(alike) > 1 else ""
            notes.append(f"classes that differ in {what} only: {', '.join(map(shown, alike[0]))}{more}")
    return notes


def _alike(names: Sequence[str], form: Callable[[str], str]) -> list[list[str]]:
    """Groups of names that become equal under `form`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(form(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def read_lines(path: str | Path, where: str, expected: str) -> list[str]:
    """The lines of a text file that are not blank. Raises RecipeError, its message beginning with `where`."""
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise RecipeError(f"{where}: {reason}. Expected {expected}") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names from a text file (one per line) or from another dataset. Raises RecipeError or DataError."""
    if path.is_dir() or path.suffix == ".json":
        names = Manifest.load(path).class_names
    else:
        names = tuple(read_lines(path, f"--classes {path}", "a file of one class name a line, or a dataset"))
    repeated = sorted(name for name, times in Counter(names).items() if times > 1)
    if repeated or not names:
        what = f"repeats {', '.join(map(repr, repeated[:5]))}" if repeated else "has no class names"
        raise RecipeError(f"--classes {path}: {what}")
    return names


def refuse_splits(class_names: Iterable[str], src: str) -> None:
    """Raise DataError if the classes found are names of splits: a test set would end up in a training set."""
    names = sorted(class_names)
    splits = [name for name in names if name.lower() in SPLIT_NAMES]
    if splits and (splits == names or len(splits) > 1):
        shown = quoted(names, _SHOWN)
        raise DataError(
            f"{src}: by its folders the classes are {shown}, which are names of splits. Convert one split at a "
            "time, each into a dataset of its own; --classes if these really are classes, --labels FILE or "
            "--unlabelled if folders say nothing"
        )


class Paths:
    """All paths: their depth and shared directories. `batches` gives them anew each call, at least one in all."""

    def __init__(self, batches: Callable[[], Iterable[pa.StringArray]]) -> None:
        self._batches = batches
        self._counts: Counter[int] = Counter()  # number of paths, by number of parts
        ends: list[str] = []
        for paths in batches():
            self._counts.update((pc.count_substring(paths, "/").to_numpy() + 1).tolist())
            ends += pc.min_max(paths).as_py().values()
        # What the first and the last of sorted paths share, all between them do.
        shared = posixpath.commonpath([posixpath.dirname(end) for end in (min(ends), max(ends))])
        self._shared = shared.split("/") if shared else []
        self.common_depth = len(self._shared)

    def class_depth(self, known_classes: frozenset[str]) -> int:
        """Number of leading directories before the class. Raises DataError if images lie outside of class folders."""
        total = self._counts.total()
        if 1 in self._counts:
            raise DataError(
                f"{self._counts[1]:,} of {total:,} images lie outside of class folders: {self._shown(1)}. Expected "
                "CLASS/FILE: put every image into a folder named like its class, or give a list of labels with "
                "--labels, or say --unlabelled"
            )
        depth = min(self.common_depth, min(self._counts) - 2)
        # `train/cat/1.jpg` and a stray `train/2.jpg`: read literally, the rule would put everything into class `train`.
        if self.common_depth > depth and self._shared[depth] not in known_classes:
            beside = self._counts[depth + 2]
            if beside < total:
                folder = "/".join(self._shared[: depth + 1])
                raise DataError(
                    f"{beside:,} of {total:,} images lie beside the folders in '{folder}', not in them: "
                    f"{self._shown(depth + 2)}. Move them into class folders; or, if all images are of the one class "
                    f"'{self._shared[depth]}', say so with --classes"
                )
        return depth

    def _shown(self, depth: int) -> str:
        paths = (path for paths in self._batches() for path in paths.to_pylist() if path.count("/") + 1 == depth)
        return quoted(heapq.nsmallest(_EXAMPLES, paths), _EXAMPLES, self._counts[depth])
