"""What a source holds: images with their keys and classes, by one rule for every kind of source.

The rule: what is no image (by suffix) or hidden is ignored, and counted. Directories that all remaining paths have in
common are stripped from the front, as long as every path keeps one; the next directory is the class. What is left of
the path is the image's key, so that a tar with `train/cat/1.jpg` and a folder with `cat/1.jpg` give equal datasets.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from vitscale.errors import DataError

# HEIC is here although Pillow does not read it: a collection of them is to be reported, not overlooked.
# fmt: off
IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)
# fmt: on
_EXAMPLES = 5

HIDDEN = "hidden"
NO_IMAGE = "no image suffix"
REPLACED = "replaced later in the archive"
NO_FILE = "neither file nor folder"


class Entry(NamedTuple):
    """One image of a source.

    Attributes:
        key: class/.../file; unique, the same for every kind of source.
        class_name: the first part of the key.
        location: what the source's `read` needs.
    """

    key: str
    class_name: str
    location: Any


@dataclass(frozen=True)
class Listing:
    """All images of a source, sorted by key (by code points), and how many files were ignored, by reason."""

    entries: list[Entry]
    ignored: Counter[str]


class Source(Protocol):
    """A kind of source. Small and picklable: it travels to every worker."""

    def files(self, ignored: Counter[str]) -> Iterator[tuple[bytes, Any]]:
        """Path (parts joined by /) and location of every file; what has no bytes is counted in `ignored`."""
        ...

    def read(self, location: Any) -> bytes:
        """The bytes of one file. Raises OSError."""
        ...


def list_images(source: Source, known_classes: Iterable[str] | None = None) -> Listing:
    """The images of a source with their keys and classes.

    Args:
        source: where to look.
        known_classes: the classes that there may be; None for whatever is found.

    Raises:
        DataError: no images; images outside of class folders; classes that are not known; a damaged source.
    """
    ignored: Counter[str] = Counter()
    found: dict[tuple[str, ...], Any] = {}
    for path, location in source.files(ignored):
        # Names need not be UTF-8; what is not appears as \xff in keys. Absolute and upward paths lose just that.
        text = path.decode("utf-8", "backslashreplace")
        parts = tuple(part for part in text.split("/") if part not in ("", ".", ".."))
        if not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts):
            ignored[HIDDEN] += 1
        elif not parts[-1].lower().endswith(IMAGE_SUFFIXES):
            ignored[NO_IMAGE] += 1
        else:
            ignored[REPLACED] += parts in found
            found[parts] = location
    ignored = +ignored  # without zeros
    if not found:
        seen = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ignored.items())) or "nothing"
        raise DataError(f"no images in the source (found: {seen}). Image files end in {' '.join(IMAGE_SUFFIXES)}")
    depth = _class_depth(found, frozenset(known_classes or ()))
    entries = [Entry("/".join(parts[depth:]), parts[depth], location) for parts, location in found.items()]
    entries.sort(key=lambda entry: entry.key)
    if known_classes is not None:
        _refuse_unknown({entry.class_name for entry in entries}, set(known_classes))
    return Listing(entries, ignored)


def _class_depth(found: dict[tuple[str, ...], Any], known: frozenset[str]) -> int:
    """How many leading directories are not the class."""
    outside = [parts for parts in found if len(parts) == 1]
    if outside:
        raise DataError(
            f"{len(outside):,} of {len(found):,} images lie outside of class folders: {_examples(outside)}. "
            "Expected CLASS/FILE: put every image into a folder named like its class"
        )
    shortest = min(map(len, found))
    first, last = min(found), max(found)  # the common prefix of all is that of the extremes
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], last[:-1], strict=False)))
    depth = min(common, shortest - 2)
    # `train/cat/1.jpg` and a stray `train/2.jpg`: by the letter everything would be of the class `train`.
    if common > depth and first[depth] not in known:
        direct = [parts for parts in found if len(parts) == depth + 2]
        if len(direct) < len(found):
            raise DataError(
                f"{len(direct):,} of {len(found):,} images lie beside the folders in '{'/'.join(first[: depth + 1])}', "
                f"not in them: {_examples(direct)}. Move them into class folders; or, if all images are of the one "
                f"class '{first[depth]}', say so with --classes"
            )
    return depth


def _refuse_unknown(found: set[str], known: set[str]) -> None:
    unknown = sorted(found - known)
    if unknown:
        shown = ", ".join(map(repr, unknown[:20])) + (" ..." if len(unknown) > 20 else "")
        raise DataError(f"{len(unknown)} of {len(found)} classes of the source are not in --classes: {shown}")


def _examples(paths: Sequence[tuple[str, ...]]) -> str:
    shown = ", ".join(repr("/".join(parts)) for parts in sorted(paths)[:_EXAMPLES])
    return shown + (" ..." if len(paths) > _EXAMPLES else "")
