"""Lists a source's images on disk: one list per part of the source, written once, by a worker process.

    part-00000.arrow   key, labels (numbers into the part's own vocabulary; null: given by the folder), content
    part-00000.bin     the spool: the images' bytes, only for a source that streams
    part-00000.json    counts, vocabulary, statistics of paths; written last, so it marks a complete part

A spool consists of sorted runs: as many images as fit into memory, in the order in which shards need them. A shard
then reads one place in each run rather than places all over the disk.
"""

import itertools
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from data_tools.classes import PathStatistics, Vocabulary
from data_tools.sources.source import Item, Source
from data_tools.tasks import Progress, Task
from vitscale.ground import storage
from vitscale.ground.errors import DataError, StorageError, os_errors
from vitscale.ground.files.durable import durable_file, write_text

LISTING = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.int32())),
        pa.field("content", pa.binary(), nullable=False),
    ]
)
_BATCH_ROWS = 1 << 14
_RUN_BYTES, _LEAST_HELD = 256 << 20, 512  # an empty file takes memory, too
_MOST_LEFT = 4 << 30  # bytes of a disk that a spool leaves free, or a twentieth of a small one
# Properties of a stored object that change with its content; stores differ in their names.
_TELLING = ("size", "ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
_NO_LABEL = ("-1",)  # as many collections write it
_PLACE = struct.Struct("<QI")  # offset, size

Row = tuple[str, list[int] | None, bytes]


def order_hash(key: str, seed: int) -> int:
    """The shuffle's sort key: XXH3-64 of the image's key, seeded."""
    return xxhash.xxh3_64_intdigest(key.encode(), seed)


@dataclass(frozen=True)
class PartSummary:
    """The summary of a listed part."""

    fingerprint: str  # the part's name and fingerprint when it was listed
    images: int
    ignored: dict[str, int]  # number of other files, by reason
    names: list[str]  # class names, by the part's own label numbers
    explicit: bool  # whether labels are given by the source, not by folders
    several_labels: bool  # whether any image has more than one label
    paths: dict[str, Any]  # statistics of paths, from `PathStatistics.to_json`

    @classmethod
    def load(cls, folder: Path, part: int) -> "PartSummary | None":
        """The summary of a part, or None if it is not completely listed yet."""
        try:
            return cls(**json.loads(storage.read_bytes(folder / f"part-{part:05d}.json")))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class ListingTask(Task):
    """One part of a source to list, by its number, into a folder. The shuffle's seed decides the order in a spool."""

    source: Source
    part: int
    folder: Path
    seed: int
    fingerprint: str

    @property
    def name(self) -> str:
        return self.source.parts[self.part]

    def run(self, progress: Progress) -> int:
        """List the part; returns its number of images. Raises DataError or StorageError."""
        stem = self.folder / f"part-{self.part:05d}"
        with os_errors(f"{self.folder}: cannot be written"):
            with ExitStack() as files:
                table = files.enter_context(durable_file(stem.with_suffix(".arrow")))
                spool = files.enter_context(durable_file(stem.with_suffix(".bin"))) if self.source.streams else None
                summary = self._write(table, spool, progress)
            write_text(stem.with_suffix(".json"), json.dumps(vars(summary)))
        return summary.images

    def _items(self, ignored: Counter[str]) -> Iterator[Item]:
        """The source's items; OSErrors are the source's, and not those of writing the list."""
        try:
            yield from self.source.items(self.part, ignored)
        except OSError as error:
            if self.source.streams:
                raise StorageError(f"{self.name}: cannot be read to its end ({error.strerror or error})") from error
            raise DataError(f"{self.name}: cannot be listed ({error.strerror or error})") from error

    def _write(self, table: BinaryIO, spool: BinaryIO | None, progress: Progress) -> PartSummary:
        ignored: Counter[str] = Counter()
        vocabulary, paths = Vocabulary(), PathStatistics()
        numbers: dict[tuple[str, ...], list[int]] = {}
        images, explicit, most = 0, False, 0

        def rows() -> Iterator[Row]:
            nonlocal images, explicit, most
            for key, labels, content in self._items(ignored):
                try:
                    key.encode(), "".join(labels or ()).encode()
                except UnicodeEncodeError as error:  # such as a lone surrogate escaped in JSON
                    what = f"{key!r}: its name or label is not valid Unicode ({error.reason})"
                    raise DataError(f"{self.name}: {what}") from error
                if labels == _NO_LABEL:
                    labels = ()
                ids = None if labels is None else numbers.get(labels)
                if labels is None:
                    paths.add(key)
                elif ids is None:
                    ids = numbers[labels] = [vocabulary.number(name) for name in dict.fromkeys(labels)]
                    explicit, most = True, max(most, len(ids))
                    if len(numbers) > _BATCH_ROWS:  # there may be arbitrarily many combinations of labels
                        numbers.clear()
                images += 1
                progress.advance()
                yield key, ids, content

        stored = rows() if spool is None else _spooled(rows(), spool, self.seed)
        with pa.ipc.new_stream(table, LISTING) as writer:
            for batch in _batches(stored):
                writer.write_batch(batch)
        return PartSummary(
            self.fingerprint, images, dict(+ignored), vocabulary.names, explicit, most > 1, paths.to_json()
        )


def _spooled(rows: Iterator[Row], spool: BinaryIO, seed: int) -> Iterator[Row]:
    """Moves the rows' content to the spool; yields the rows with its place there (offset and size) instead."""
    offset = held = 0
    run: list[tuple[int, str, list[int] | None, bytes]] = []

    def flush() -> Iterator[Row]:
        nonlocal offset
        disk = shutil.disk_usage(spool.fileno())
        if disk.free - held < min(_MOST_LEFT, disk.total // 20):  # a stream may be endless, or unpack to anything
            raise DataError(
                f"{spool.name}: images that can only be read once are kept here, and would fill the disk. Give a "
                "folder on a larger one with --work"
            )
        run.sort(key=lambda row: row[0])
        for _, key, labels, content in run:
            spool.write(content)
            yield key, labels, _PLACE.pack(offset, len(content))
            offset += len(content)
        run.clear()

    for key, labels, content in rows:
        run.append((order_hash(key, seed), key, labels, content))
        held += max(len(content), _LEAST_HELD)
        if held >= _RUN_BYTES:
            yield from flush()
            held = 0
    yield from flush()


def _batches(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    while batch := list(itertools.islice(rows, _BATCH_ROWS)):
        columns = zip(*batch, strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, LISTING.types, strict=True)]
        yield pa.record_batch(arrays, schema=LISTING)


def read_listing(folder: Path, part: int) -> Iterator[pa.RecordBatch]:
    """The listed images of a part, in batches of bounded size."""
    with pa.OSFile(str(folder / f"part-{part:05d}.arrow")) as file, pa.ipc.open_stream(file) as reader:
        yield from reader


@dataclass(frozen=True)
class Spool:
    """Reads back the images of a source that streams. Sent to every worker."""

    folder: Path

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises DataError if the spool is missing or cut, OSError if the disk fails."""
        offset, size = _PLACE.unpack(content)
        path = self.folder / f"part-{part:05d}.bin"
        try:
            with FileIO(path, opener=storage.regular) as file:
                data = os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            data = b""
        if len(data) != size:  # not the image's fault: it must not be rejected
            raise DataError(f"{path}: the spool of streamed images is missing or cut. Remove the output and start anew")
        return data


def fingerprint(part: str) -> str:
    """A text that changes when a part's content changes: a file's size and time, or what a store says of an object.

    Empty for a folder, whose properties say nothing about the files below it. Raises DataError or StorageError.
    """
    with os_errors(f"{part}: cannot be read"):
        if storage.is_url(part):
            fs, path = storage.filesystem(part)
            info = storage.patiently(part, lambda: fs.info(path))
            return "" if info["type"] == "directory" else str({name: str(info.get(name)) for name in _TELLING})
        status = Path(part).stat()
    return "" if Path(part).is_dir() else f"{status.st_size}-{status.st_mtime_ns}"
