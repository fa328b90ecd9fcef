"""The work of one worker: the images of one shard -> the shard and its table of provenance.

A task is a function of its arguments and repeatable: nothing that it does depends on other shards.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.images import Reject, store_image
from data_tools.sources.listing import Entry, Source
from vitscale.durable import durable_file
from vitscale.errors import DataError
from vitscale.shards import ShardEntry, ShardStats, StoredSample, write_shard

_PROVENANCE = pa.schema(
    [
        pa.field("uid", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),  # bytes as stored
        pa.field("crc32c", pa.uint32(), nullable=False),  # of the bytes as stored
        pa.field("sha256", pa.binary(32), nullable=False),  # of the source's bytes
        pa.field("passed_through", pa.bool_(), nullable=False),
    ]
)
_REJECTS = pa.schema([pa.field("key", pa.string(), nullable=False), pa.field("reason", pa.string(), nullable=False)])


class Progress(Protocol):
    """Where a task says how far it is: counts of images done and of these rejected."""

    def advance(self, rejected: bool) -> None: ...


@dataclass(frozen=True)
class ShardTask:
    """One shard to write.

    Attributes:
        index: number of the shard; also names its files in `out`.
        first_uid: uid of the first entry; the others follow.
        entries, labels: the images and their class indices, in order.
        capacity: samples of a full shard.
    """

    index: int
    out: Path
    source: Source
    first_uid: int
    entries: list[Entry]
    labels: list[int]
    capacity: int


@dataclass
class ShardReport:
    """What became of a task: the manifest's entry (None if no image was left), and what to count."""

    index: int
    entry: ShardEntry | None = None
    passed_through: int = 0
    transcoded: int = 0
    seconds: float = 0.0
    rejects: list[tuple[str, str]] = field(default_factory=list)  # key, reason


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.beton"


def provenance_name(index: int) -> str:
    """File name of the table that says where a shard's samples came from."""
    return f"shard-{index:05d}.idx.parquet"


def convert_shard(task: ShardTask, progress: Progress) -> ShardReport:
    """Write one shard and its provenance. Raises DataError if the disk refuses."""
    started = time.monotonic()
    report = ShardReport(task.index)
    rows: dict[str, list[Any]] = {name: [] for name in _PROVENANCE.names}
    path = task.out / shard_name(task.index)
    try:
        stats = _write(path, _samples(task, report, rows, progress), task.capacity)
        if stats is not None:
            rows["crc32c"] = stats.crc.tolist()
            write_table(task.out / provenance_name(task.index), pa.table(rows, _PROVENANCE))
            report.entry = ShardEntry.of_file(path, samples=stats.samples, first_uid=stats.first_uid)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be written ({error.strerror or error})") from error
    report.seconds = time.monotonic() - started
    return report


def _write(path: Path, samples: Iterator[StoredSample], capacity: int) -> ShardStats | None:
    """Write the shard, unless there is not a single sample."""
    first = next(samples, None)
    if first is None:
        return None

    def all_samples() -> Iterator[StoredSample]:
        yield first
        yield from samples

    return write_shard(path, all_samples(), capacity)


def _samples(
    task: ShardTask, report: ShardReport, rows: dict[str, list[Any]], progress: Progress
) -> Iterator[StoredSample]:
    """The samples that can be stored; the rest goes to the report. One image in memory at a time."""
    for position, (entry, label) in enumerate(zip(task.entries, task.labels, strict=True)):
        uid = task.first_uid + position
        try:
            data = task.source.read(entry.location)
            image = store_image(data)
        except OSError as error:
            image = Reject(f"cannot be read: {error.strerror or error}")
        if isinstance(image, Reject):
            report.rejects.append((entry.key, image.reason))
            progress.advance(rejected=True)
            continue
        report.passed_through += image.passed_through
        report.transcoded += not image.passed_through
        for name, value in (
            ("uid", uid),
            ("key", entry.key),
            ("label", label),
            ("height", image.height),
            ("width", image.width),
            ("size", len(image.jpeg)),
            ("sha256", hashlib.sha256(data).digest()),
            ("passed_through", image.passed_through),
        ):
            rows[name].append(value)
        yield StoredSample(image.jpeg, image.height, image.width, label, uid)
        progress.advance(rejected=False)


def write_rejects(path: Path, rejects: list[tuple[str, str]]) -> None:
    """Write the table of images that could not be stored. Raises OSError."""
    keys, reasons = [key for key, _ in rejects], [_printable(reason) for _, reason in rejects]
    write_table(path, pa.table({"key": keys, "reason": reasons}, _REJECTS))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file, complete or not at all. Raises OSError."""
    with durable_file(path) as file:
        pq.write_table(table, file, compression="zstd")
