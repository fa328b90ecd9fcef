"""Class names: collected while images are listed, numbered once all are known."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from vitscale.data.shards import Manifest
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.storage import read_text
from vitscale.ground.wording import counted, ranges

_MAX_NUMBER = 10_000_000
_SHOWN = 20
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.0+)?")  # 3.0: what integers become in a table with missing values


class Vocabulary:
    """Class names in the order of their first appearance; a name's position is its provisional number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The provisional number of a class; a new class gets the next one."""
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.names)
            self.names.append(name)
            if found > _MAX_NUMBER:
                raise DataError(
                    f"more than {_MAX_NUMBER:,} different labels, such as {self.names[0]!r} and {name!r}: "
                    "are these captions? Choose another field with --label-field"
                )
        return found


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

    Returns:
        All class names by label, and the label of each of `names`, int32.

    Raises:
        DataError: a class is not in the given order, or only some of the names are numbers.
    """
    order = known or stated
    numbers = [] if from_folders else [int(float(name)) for name in names if _NUMBER.fullmatch(name)]
    are_numbers = bool(numbers) and len(numbers) == len(names)
    if order is not None:
        label_of = {name: label for label, name in enumerate(order)}
        if are_numbers and not label_of.keys() & set(names) and max(numbers) < len(order):
            return order, np.array(numbers, np.int32)
        unknown = sorted(name for name in names if name not in label_of)
        if unknown:
            shown = ", ".join(map(repr, unknown[:_SHOWN])) + (" ..." if len(unknown) > _SHOWN else "")
            where = "--classes" if known else "the source's own list of classes"
            raise DataError(f"{len(unknown)} of {len(names)} classes of the source are not in {where}: {shown}")
        return order, np.array([label_of[name] for name in names], np.int32)
    if are_numbers:
        if max(numbers) >= _MAX_NUMBER:
            raise DataError(f"labels go up to {max(numbers):,}: are these class numbers? Give names with --classes")
        return tuple(map(str, range(max(numbers) + 1))), np.array(numbers, np.int32)
    if numbers:
        others = [name for name in names if not _NUMBER.fullmatch(name)]
        raise DataError(
            f"labels are numbers except for {', '.join(map(repr, others[:_SHOWN]))}. Expected numbers or names "
            "throughout; --classes FILE if these are names of classes"
        )
    ordered = sorted(names)
    label_of = {name: label for label, name in enumerate(ordered)}
    return tuple(ordered), np.array([label_of[name] for name in names], np.int32)


def class_notes(names: Sequence[str], empty: list[int]) -> list[str]:
    """Likely mistakes, one line each: a single class, classes without images, names that look alike.

    Args:
        names: all class names, by label.
        empty: labels without an image, sorted.
    """
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


def read_classes(path: Path) -> tuple[str, ...]:
    """Class names from a text file (one per line) or from another dataset. Raises RecipeError or DataError."""
    if path.is_dir() or path.suffix == ".json":
        names = Manifest.load(path).class_names
    else:
        try:
            lines = read_text(path, "utf-8-sig").split("\n")
            names = tuple(line.removesuffix("\r") for line in lines if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
            raise RecipeError(
                f"--classes {path}: {what}. Expected a file of one class name a line, or a dataset"
            ) from error
    repeated = _repeated(names)
    if repeated or not names:
        what = f"repeats {', '.join(map(repr, repeated[:5]))}" if repeated else "has no class names"
        raise RecipeError(f"--classes {path}: {what}")
    return names


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
