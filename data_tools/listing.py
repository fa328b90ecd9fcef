"""Lists a source's images on disk, one list per part, and shuffles them: sorts all by the hash of their keys.

    part-00000.arrow   key, labels (numbers into the part's own vocabulary; null: given by the folder), content
    part-00000.bin     the spool: the images' bytes, only for a source that streams
    part-00000.json    counts, vocabulary; written last, so it marks a complete part
    buckets/           all images, dealt by the first bits of their hash; each bucket is sorted in memory

A spool consists of sorted runs: as many images as fit into memory, in the order in which shards need them. A shard
then reads one place in each run rather than places all over the disk.

Images are sorted by (XXH3-64 of the key, key), the hash seeded by the shuffle's seed. The permutation depends on keys
and seed only, and added images do not change the order of the others.
"""

import itertools
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from data_tools.classes import Paths, Vocabulary, order_classes, refuse_splits
from data_tools.sources.source import Item, Source
from data_tools.tasks import Progress, Task
from vitscale.ground import storage
from vitscale.ground.errors import DataError, StorageError, os_errors
from vitscale.ground.files.durable import durable_file, write_text

_KEY, _CONTENT = pa.field("key", pa.string(), nullable=False), pa.field("content", pa.binary(), nullable=False)
_LABELS, _PART = pa.list_(pa.int32()), pa.field("part", pa.int32(), nullable=False)
LISTING = pa.schema([_KEY, pa.field("labels", _LABELS), _CONTENT])
ORDERED = pa.schema([_KEY, pa.field("labels", _LABELS, nullable=False), _PART, _CONTENT])
# With the key's hash, the position in the listing, and provisional numbers as labels.
_DEALT = pa.schema(
    [pa.field("hash", pa.uint64(), nullable=False), pa.field("number", pa.int64(), nullable=False), *ORDERED]
)
_BUCKET_ROWS = 1 << 14
_MAX_BUCKETS = 512  # all of their files are open at once
REPLACED = "replaced later in the archive"
_BATCH_ROWS = 1 << 14
_RUN_BYTES, _LEAST_HELD = 256 << 20, 512  # an empty file takes memory, too
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

    @classmethod
    def load(cls, folder: Path, part: int) -> "PartSummary | None":
        """The summary of a part, or None if it is not completely listed yet."""
        with suppress(FileNotFoundError, TypeError):  # TypeError: an earlier version's has other fields
            return cls(**json.loads(storage.read_bytes(folder / f"part-{part:05d}.json")))
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
        vocabulary = Vocabulary()
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
                if labels is not None and ids is None:
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
        return PartSummary(self.fingerprint, images, dict(+ignored), vocabulary.names, explicit, most > 1)


def _spooled(rows: Iterator[Row], spool: BinaryIO, seed: int) -> Iterator[Row]:
    """Moves the rows' content to the spool; yields the rows with its place there (offset and size) instead."""
    offset = held = 0
    run: list[tuple[int, str, list[int] | None, bytes]] = []

    def flush() -> Iterator[Row]:
        nonlocal offset
        if not storage.has_room(spool.fileno(), held):  # a stream may be endless, or unpack to anything
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


class Ordered(NamedTuple):
    """All images of a source in shuffled order, in batches of schema `ORDERED`, and their classes."""

    batches: Iterator[pa.RecordBatch]  # the images; can be iterated once
    class_names: tuple[str, ...]  # names by label
    several_labels: bool  # whether any image has more than one label
    ignored: Counter[str]  # number of files that are not images, by reason; complete once `batches` is exhausted


def order_images(
    source: Source, listing: Path, seed: int, known_classes: tuple[str, ...] | None, *, unlabelled: bool = False
) -> Ordered:
    """Sort the images of a complete listing.

    Args:
        listing: folder of the parts' lists; also holds the buckets for as long as they are needed.
        known_classes: all classes in order; None for the source's own order, or else the classes found, sorted.
        unlabelled: whether to give no image a label, whatever the source says.

    Raises DataError: no images, an image outside of class folders, an unknown class, or one key twice.
    """
    where = ", ".join(source.parts[:3]) + (" ..." if len(source.parts) > 3 else "")
    summaries = [summary for part in range(len(source.parts)) if (summary := PartSummary.load(listing, part))]
    assert len(summaries) == len(source.parts), "a part was not listed"
    ignored = sum((Counter(summary.ignored) for summary in summaries), Counter())
    if not sum(summary.images for summary in summaries):
        seen = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ignored.items())) or "nothing"
        raise DataError(f"{where}: no images in the source (found: {seen})")
    explicit = any(summary.explicit for summary in summaries)
    depth = None
    if not explicit:
        parts = range(len(summaries))
        paths = Paths(lambda: (batch["key"] for part in parts for batch in read_listing(listing, part)))
        depth = paths.common_depth if unlabelled else paths.class_depth(frozenset(known_classes or ()))
    vocabulary = Vocabulary()
    buckets = _deal(summaries, listing, seed, vocabulary, depth, unlabelled)
    class_names: tuple[str, ...] = ()
    label_of = np.empty(0, np.int32)
    if not unlabelled:
        class_names, label_of = order_classes(
            vocabulary.names, source.class_names, known_classes, from_folders=depth is not None
        )
        if depth is not None and known_classes is None:
            refuse_splits(class_names, where)
    several = not unlabelled and any(summary.several_labels for summary in summaries)
    return Ordered(_sorted(buckets, label_of, source, explicit, ignored), class_names, several, ignored)


def _deal(
    summaries: list[PartSummary], listing: Path, seed: int, vocabulary: Vocabulary, depth: int | None, unlabelled: bool
) -> list[Path]:
    """Append every image to its hash's bucket. `depth`: the class folder's depth, None for explicit labels."""
    count = min(_MAX_BUCKETS, -(-sum(summary.images for summary in summaries) // _BUCKET_ROWS))
    folder = listing / "buckets"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    paths = [folder / f"bucket-{i:03d}.arrow" for i in range(count)]
    number = 0
    with ExitStack() as files:
        writers = [
            files.enter_context(pa.ipc.new_stream(files.enter_context(pa.OSFile(str(path), "wb")), _DEALT))
            for path in paths
        ]
        for part, summary in enumerate(summaries):
            numbers = np.array([vocabulary.number(name) for name in summary.names], np.int32)
            for batch in read_listing(listing, part):
                keys = batch.column("key").to_pylist()
                if depth:
                    keys = [key.split("/", depth)[depth] for key in keys]
                if depth is None or unlabelled:
                    labels = _renumbered(batch.column("labels"), numbers, unlabelled)
                else:
                    classes = np.array([vocabulary.number(key.split("/", 1)[0]) for key in keys], np.int32)
                    labels = pa.ListArray.from_arrays(np.arange(len(keys) + 1, dtype=np.int32), pa.array(classes))
                hashes = np.array([order_hash(key, seed) for key in keys], np.uint64)
                columns = [
                    pa.array(hashes),
                    pa.array(np.arange(number, number + len(keys))),
                    pa.array(keys, pa.string()) if depth else batch.column("key"),
                    labels,
                    pa.array(np.full(len(keys), part, np.int32)),
                    batch.column("content"),
                ]
                number += len(keys)
                # (hash >> 32) * count >> 32 is the number of the hash's range, of `count` equal ranges.
                bucket = ((hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)
                dealt = pa.record_batch(columns, schema=_DEALT).take(pa.array(np.argsort(bucket, kind="stable")))
                ends = np.cumsum(np.bincount(bucket, minlength=count))
                for i, end in enumerate(ends.tolist()):
                    start = ends[i - 1] if i else 0
                    if end > start:
                        writers[i].write_batch(dealt.slice(start, end - start))
    return paths


def _renumbered(labels: pa.ListArray, numbers: np.ndarray, unlabelled: bool) -> pa.ListArray:
    """Labels translated from the part's own vocabulary to the common one; empty if `unlabelled`."""
    if unlabelled:
        return pa.ListArray.from_arrays(np.zeros(len(labels) + 1, np.int32), pa.array([], pa.int32()))
    values = labels.flatten().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(labels), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(numbers[values].astype(np.int32)))


def _sorted(
    buckets: list[Path], label_of: np.ndarray, source: Source, explicit: bool, ignored: Counter[str]
) -> Iterator[pa.RecordBatch]:
    """The images of each bucket in order. Raises DataError for a key that occurs twice."""
    for path in buckets:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
        path.unlink()
        table = table.sort_by([("hash", "ascending"), ("key", "ascending"), ("number", "ascending")])
        if table.num_rows:
            table = _once(table, source, explicit, ignored)
            labels = table.column("labels").combine_chunks()
            labels = _renumbered(labels, label_of, unlabelled=False)
            columns = [table.column("key"), labels, table.column("part"), table.column("content")]
            yield from pa.table(columns, schema=ORDERED).combine_chunks().to_batches()
    if buckets:
        buckets[0].parent.rmdir()


def _once(table: pa.Table, source: Source, explicit: bool, ignored: Counter[str]) -> pa.Table:
    """Of equal paths in one archive the last, as unpacking it would. Else equal keys are an error."""
    hashes = table.column("hash").to_numpy()
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    dropped = []
    for i in same.tolist():
        key, following = table.column("key")[i].as_py(), table.column("key")[i + 1].as_py()
        if key != following:
            continue
        part, other = table.column("part")[i].as_py(), table.column("part")[i + 1].as_py()
        if part != other or explicit:
            places = source.parts[part] if part == other else f"{source.parts[part]} and {source.parts[other]}"
            raise DataError(
                f"{key!r} occurs twice, in {places}. Every image needs its own name; several labels of one image "
                "belong in one record"
            )
        dropped.append(i)
    if not dropped:
        return table
    ignored[REPLACED] += len(dropped)
    keep = np.ones(table.num_rows, bool)
    keep[dropped] = False
    return table.filter(pa.array(keep))
