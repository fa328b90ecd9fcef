"""The interface of a source: every kind of image collection as the converter sees it.

A source consists of parts (the files of a collection) that are listed independently, in worker processes. It comes in
two kinds. From one with random access the converter first takes the list, then reads images in its own order. One that
can only be streamed (a compressed or remote archive, parquet) yields every image with its bytes; the converter keeps
them in a spool on this machine's disk and reads them from there.
"""

import errno
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vitscale.data.shards.images import IMAGE_SUFFIXES, refuse_too_large
from vitscale.ground.errors import DataError, RecipeError

HIDDEN = "hidden"
NO_IMAGE = "no image suffix"
_MAX_PATH_BYTES = 4096  # PATH_MAX of Linux
LONG = f"of a path of more than {_MAX_PATH_BYTES:,} bytes"
NO_FILE = "neither file nor folder"
RANGE = struct.Struct("<QQ")  # an image's offset and size in the file that holds it


class Item(NamedTuple):
    """One image of a source."""

    key: str  # the image's name, unique in the source. If classes are folders, a path with parts joined by /
    # Names of its classes, the main one first; empty for no label. None if the class is the key's first directory that
    # not all images share. Numbers are written in decimals.
    labels: tuple[str, ...] | None
    content: bytes  # where its bytes are, as the source's `read` understands it; from a stream, the bytes themselves


@dataclass(frozen=True)
class SourceOptions:
    """The user's choices: a label list, which fields of a record are the image and the label, or no labels at all."""

    labels: str | None = None
    image_field: str | None = None
    label_field: str | None = None
    unlabelled: bool = False


class Source(Protocol):
    """A kind of source. Small and picklable: it is sent to every worker."""

    @property
    def streams(self) -> bool:
        """Whether items carry their bytes; `read` is not needed then."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts' paths or URLs."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes in the source's own order; None if it states none."""

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """A part's images; other files count in `ignored`, by reason. Raises DataError for damage in that part."""

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError (TooLarge, before reading) or StorageError."""


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: a surrogate that replaces an undecodable byte becomes \\udcff."""
    return text.encode("utf-8", "backslashreplace").decode()


def visible_path(path: bytes, ignored: Counter[str]) -> str | None:
    """A path as it appears in keys, or None (counted in `ignored`) if it is hidden or too long for a file system.

    Bytes that are not UTF-8 appear as \\xff in keys. Absolute and upward paths lose only those parts.
    """
    if len(path) > _MAX_PATH_BYTES:
        ignored[LONG] += 1
        return None
    parts = [part for part in path.decode("utf-8", "backslashreplace").split("/") if part not in ("", ".", "..")]
    if not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts):
        ignored[HIDDEN] += 1
        return None
    return "/".join(parts)


def path_item(path: bytes, content: bytes, ignored: Counter[str]) -> Item | None:
    """The item of a file whose folders give its class, or None (counted in `ignored`) if hidden or not an image."""
    key = visible_path(path, ignored)
    if key is not None and not key.lower().endswith(IMAGE_SUFFIXES):
        ignored[NO_IMAGE] += 1
        return None
    return None if key is None else Item(key, None, content)


def read_range(where: str, content: bytes, kind: str) -> bytes:
    """An image file inside a local file, a `kind`, at the packed `RANGE`. Raises OSError; TooLarge before reading."""
    offset, size = RANGE.unpack(content)
    refuse_too_large(size)
    with Path(where).open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise OSError(errno.EIO, f"the {kind} has become shorter", where)
    return data


def numbered_label(number: int, where: str) -> tuple[str, ...]:
    """The labels of a record whose class is a number; -1 means none, as in many collections. Raises DataError."""
    if number < -1:
        raise DataError(f"{where}: label {number}; expected 0 or more, or -1 for none")
    return () if number == -1 else (str(number),)


def labels_of(value: Any, where: str, class_names: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Labels from text, a whole number (of `class_names`, if any), a list of these, or None. Else raises DataError."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, int) and not isinstance(value, bool):
        if class_names is not None and value >= len(class_names):
            raise DataError(f"{where}: label {value}; there are {len(class_names)} classes")
        numbered = numbered_label(value, where)
        return numbered if class_names is None or not numbered else (class_names[value],)
    if isinstance(value, list) and not any(isinstance(label, list) for label in value):
        return tuple(dict.fromkeys(name for label in value for name in labels_of(label, where, class_names)))
    raise DataError(f"{where}: label {str(value)[:100]}; expected text, a whole number, a list of them, or null")


IMAGE_NAMES = frozenset(
    {"path", "file", "filepath", "file_path", "file_name", "filename", "image", "image_path", "url", "uri"}
)
_LABEL_NAMES = frozenset({"label", "labels", "class", "class_name", "class_id", "target", "cls"})


def choose_image(columns: Sequence[str], candidates: Sequence[str], options: SourceOptions, where: str) -> str:
    """The column of images: the user's choice, else the only candidate. Raises RecipeError."""
    return _choose(columns, candidates, options.image_field, "images", "--image-field NAME", where)


def choose_label(columns: Sequence[str], candidates: Sequence[str], options: SourceOptions, where: str) -> str | None:
    """The column of labels: the user's choice, else the only candidate; None for no labels. Raises RecipeError."""
    if options.unlabelled:
        return None
    return _choose(columns, candidates, options.label_field, "labels", "--label-field NAME, or --unlabelled", where)


def label_columns(columns: Iterable[str]) -> list[str]:
    """The columns named like labels; if classes have both a name and a number column, only the names."""
    found = {column.lower(): column for column in columns if column.lower() in _LABEL_NAMES}
    if "class_name" in found:
        return [found["class_name"]]
    if len(found) > 1:
        found.pop("class_id", None)
    return list(found.values())


def refuse_fields(options: SourceOptions, kind: str) -> None:
    """Raise RecipeError if the user names fields of a source that has none to choose from."""
    for flag, value in (("--image-field", options.image_field), ("--label-field", options.label_field)):
        if value is not None:
            raise RecipeError(f"{flag} {value}: {kind} has no fields to choose from; leave it out")


def _choose(
    columns: Sequence[str], candidates: Sequence[str], wanted: str | None, what: str, flags: str, where: str
) -> str:
    there = f"there are {', '.join(columns) or 'none'}"
    if wanted is not None:
        if wanted in columns:
            return wanted
        raise RecipeError(f"{where}: no column {wanted!r}; {there}")
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise RecipeError(f"{where}: {what} may be in any of the columns {', '.join(candidates)}. Say which: {flags}")
    raise RecipeError(f"{where}: no column that is known to hold {what}; {there}. Say which: {flags}")
