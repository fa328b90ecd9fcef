"""Images of one part of a task, from a copy in any layout, as a source that conversion reads."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.sources.folder import FolderSource
from data_tools.sources.parts import reading
from data_tools.sources.source import Item, Source, SourceOptions
from data_tools.sources.tar import open_tars
from data_tools.sources.tfrecord import count_records, open_records, open_tfrecords
from data_tools.vtab.copies import Copy
from data_tools.vtab.tasks import ORIGINS
from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.errors import DataError
from vitscale.ground.storage import read_bytes
from vitscale.ground.vtab import TASKS


@dataclass(frozen=True)
class FileRows:
    """The images taken from one file: a part of a split's source, and the numbers of its images, ascending."""

    source: Source
    part: int
    split: str
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.source.parts[self.part]


@dataclass(frozen=True)
class PartSource:
    """The images of a part of a task. Keys are the copy's own, prefixed by the name of their split."""

    task: str
    pieces: tuple[FileRows, ...]  # of the files that hold its images
    known_names: tuple[str, ...] | None  # the classes in the order in which the copy names them; None if numbered
    class_names: tuple[str, ...]  # by label, as the dataset will have them

    @property
    def streams(self) -> bool:
        return any(piece.source.streams for piece in self.pieces)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        """The images that are taken of a file. Raises DataError for damage and labels that the task does not have."""
        return (item for _, item in self.numbered(part, ignored))

    def numbered(self, part: int, ignored: Counter[str]) -> Iterator[tuple[int, Item]]:
        """The same images as (number in the file, item)."""
        piece = self.pieces[part]
        for number, item in taken(piece, ignored):
            names = (self.class_names[self._label(item, piece)],)
            content = self._shown(item.content) if self.streams else item.content
            yield number, Item(f"{piece.split}/{item.key}", names, content)

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError."""
        if self.streams:
            return content
        piece = self.pieces[part]
        return self._shown(piece.source.read(piece.part, content))

    def label_of(self, item: Item) -> int:
        """The number of the class of one of these items."""
        assert item.labels is not None
        return self.class_names.index(item.labels[0])

    def _label(self, item: Item, piece: FileRows) -> int:
        names = (item.key.partition("/")[0],) if item.labels is None else item.labels
        where = f"{piece.name}: {item.key!r}"
        if len(names) != 1:
            raise DataError(f"{where}: {len(names)} labels; expected one")
        if self.known_names is not None:
            if names[0] not in self.known_names:
                raise DataError(f"{where}: class {names[0][:100]!r}, which {self.task} does not have")
            return self.known_names.index(names[0])
        if not names[0].isdecimal() or len(names[0]) > 18 or int(names[0]) >= len(self.class_names):
            raise DataError(
                f"{where}: label {names[0][:100]}; {self.task} has {len(self.class_names)} classes, numbered from 0"
            )
        return int(names[0])

    def _shown(self, image: bytes) -> bytes:
        return with_full_contrast(image) if ORIGINS[self.task].is_binary else image


def taken(piece: FileRows, ignored: Counter[str]) -> Iterator[tuple[int, Item]]:
    """(number, item) of the images taken from a file, which is read no further than the last of them."""
    items: Iterator[Item] = piece.source.items(piece.part, ignored)
    if isinstance(piece.source, FolderSource):  # lists files in the disk's order
        items = iter(sorted(items, key=lambda item: item.key))
    wanted = frozenset(piece.rows)
    return ((number, item) for number, item in enumerate(islice(items, piece.rows[-1] + 1)) if number in wanted)


def with_full_contrast(image: bytes) -> bytes:
    """A picture with values 0 and 1 as a PNG with 0 and 255; any other image unchanged."""
    stored = store_image(image)
    if isinstance(stored, Reject) or stored.pixels.max() > 1:
        return image
    out = io.BytesIO()
    Image.fromarray(stored.pixels * np.uint8(255)).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class OpenCopy:
    """A copy with open splits; the names of classes as in `PartSource`."""

    copy: Copy
    sources: Mapping[str, Source]  # by split
    counts: Mapping[str, tuple[int, ...]]  # number of images in each file, by split
    known_names: tuple[str, ...] | None
    class_names: tuple[str, ...]

    def part(self, rows: Mapping[str, Sequence[int]]) -> PartSource:
        """The source of the images with these numbers in their splits."""
        pieces = [piece for split in self.sources for piece in self._pieces(split, rows.get(split, ()))]
        return PartSource(self.copy.task, tuple(pieces), self.known_names, self.class_names)

    def size(self, split: str) -> int:
        """Number of images in a split."""
        return sum(self.counts[split])

    def items(self, splits: Iterable[str]) -> Iterator["FoundImage"]:
        """All images of these splits."""
        for split in splits:
            begin = 0
            for count in self.counts[split]:
                source = self.part({split: range(begin, begin + count)})  # of one piece, or none
                for part in range(len(source.pieces)):
                    for row, item in source.numbered(part, Counter()):
                        yield FoundImage(split, begin + row, item, source)
                begin += count

    def _pieces(self, split: str, rows: Sequence[int]) -> Iterator[FileRows]:
        begin = 0
        for number, count in enumerate(self.counts[split]):
            own = tuple(row - begin for row in rows if begin <= row < begin + count)
            if own:
                yield FileRows(self.sources[split], number, split, own)
            begin += count


@dataclass(frozen=True)
class FoundImage:
    """An image of a copy."""

    split: str
    number: int  # within the split
    item: Item
    source: PartSource  # of its file alone

    @property
    def key(self) -> str:
        return self.item.key

    @property
    def label(self) -> int:
        """Its class number."""
        return self.source.label_of(self.item)

    def read(self) -> bytes:
        """The bytes of its file. Raises OSError."""
        return self.source.read(0, self.item.content)


def open_copy(copy: Copy) -> OpenCopy:
    """Open the splits of a copy and count their images. Raises DataError or RecipeError if one cannot be read."""
    sources = {split: _open_split(copy, files) for split, files in copy.files.items()}
    counts = {split: tuple(_count(copy, sources[split])) for split in sources}
    known = _known_names(copy, sources)
    return OpenCopy(copy, sources, counts, known, _class_names(copy, known))


def _open_split(copy: Copy, files: Sequence[Path]) -> Source:
    names, rule = [str(path) for path in files], ORIGINS[copy.task].rule
    where = str(copy.folder)
    match copy.layout:
        case "tfds":
            opened = open_tfrecords(where, names, SourceOptions(image_field="image", unlabelled=True))
            return replace(opened, rule=rule)
        case "tars":
            return open_tars(where, names, SourceOptions(label_field="cls"))
        case "folders":
            return FolderSource(tuple(names))


def _count(copy: Copy, source: Source) -> Iterator[int]:
    for part, where in enumerate(source.parts):
        if copy.layout == "tfds":
            with reading(where), closing(open_records(where)) as file:
                yield count_records(file, where)
        else:
            yield sum(1 for _ in source.items(part, Counter()))


def _known_names(copy: Copy, sources: Mapping[str, Source]) -> tuple[str, ...] | None:
    if copy.layout != "folders":
        return None
    found = {path.name for files in copy.files.values() for path in files[0].iterdir() if path.is_dir()}
    stated, num_classes = ORIGINS[copy.task].class_names, TASKS[copy.task].num_classes
    if all(name.isdecimal() for name in found):
        return tuple(map(str, range(num_classes)))
    return stated if stated is not None and found <= set(stated) else tuple(sorted(found))


def _class_names(copy: Copy, known: tuple[str, ...] | None) -> tuple[str, ...]:
    num_classes, where = TASKS[copy.task].num_classes, str(copy.folder)
    names = known
    for file in ("label.labels.txt", "classnames.txt"):
        if names is None and (copy.folder / file).is_file():
            where = str(copy.folder / file)
            with reading(where):
                lines = read_bytes(where).decode("utf-8", "backslashreplace").splitlines()
                names = tuple(line for line in lines if line.strip())
    if names is not None and (len(names) != num_classes or len(set(names)) != num_classes):
        raise DataError(f"{where}: names {len(set(names))} different classes; {copy.task} has {num_classes}")
    return ORIGINS[copy.task].class_names or names or tuple(map(str, range(num_classes)))
