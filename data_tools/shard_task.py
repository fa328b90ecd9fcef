"""The work of one worker: the images of one shard -> the shard and its table of provenance.

A task is a function of its arguments and repeatable: nothing that it does depends on other shards. Its marker, written
last, says that it is done; what a killed task leaves behind has temporary names only.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from data_tools.engines.task import Progress
from data_tools.images import ImageOptions, Reject, store_image
from data_tools.output import Output
from vitscale.errors import DataError
from vitscale.shards import NO_LABEL, ShardEntry, ShardStats, StoredSample, write_shard
from vitscale.shards.provenance import PROVENANCE, REJECTS, provenance_path, write_provenance, write_rejects

# What stays so: the file is not there, or is not for us.
_STEADY = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PAUSE = 1.0  # seconds


class Reader(Protocol):
    """Where a task gets images from: a source with random access, or the spool of one that streams."""

    def read(self, part: int, content: bytes) -> bytes: ...


@dataclass
class ShardReport:
    """What became of a task, as its marker has it: the manifest's entry (None if no image was left), and counts.

    `unread` of the rejected ones could not even be read, or workers died on them; of these, `unsteady` may be read at
    the next try.
    """

    task: int
    split: str
    entry: ShardEntry | None = None
    passed_through: int = 0
    transcoded: int = 0
    rejected: int = 0
    unread: int = 0
    unsteady: int = 0
    is_to_be_repeated: bool = False
    seconds: float = 0.0

    def to_json(self) -> str:
        content = asdict(self) | {"entry": self.entry and self.entry.model_dump(mode="json")}
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ShardReport":
        content = json.loads(text)
        entry = content.pop("entry")
        return cls(entry=entry and ShardEntry.model_validate(entry), **content)


@dataclass(frozen=True)
class ShardTask:
    """One shard to write.

    Attributes:
        index: the task's number in the plan.
        split: name of the data set that the shard belongs to; empty for the only one.
        shard: its number there; names its files.
        rows: the images, of schema `plan.PLAN`.
        reader: where their bytes are.
        output: where the shard goes.
        options: how images are stored.
        several_labels: whether samples have a list of labels.
        refused: positions of images on which workers die, and how.
    """

    index: int
    split: str
    shard: int
    rows: pa.RecordBatch
    reader: Reader
    output: Output
    options: ImageOptions
    several_labels: bool
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"shard {self.shard}" + (f" of {self.split}" if self.split else "")

    def describe(self, position: int) -> str:
        """What people call the image at a position."""
        if position >= self.rows.num_rows:
            return f"the end of {self.name}"
        return repr(self.rows.column("key")[position].as_py())

    def without(self, position: int, reason: str) -> "ShardTask | None":
        """The task with one image rejected."""
        if position >= self.rows.num_rows:
            return None
        return replace(self, refused=self.refused | {position: reason})

    def run(self, progress: Progress) -> ShardReport:
        """Write the shard, its provenance and its marker. Raises DataError if the disk refuses, or StorageError."""
        started = time.monotonic()
        report = ShardReport(self.index, self.split)
        columns: dict[str, list[Any]] = {name: [] for name in PROVENANCE.names}
        rejects: dict[str, list[str]] = {name: [] for name in REJECTS.names}
        name = shard_name(self.shard)
        try:
            with self.output.staged(self.split, [name, provenance_path(name)]) as (path, table_path):
                stats = _write(path, self._samples(report, columns, rejects, progress), self.rows.num_rows)
                if stats is not None:
                    progress.alive()
                    columns["crc32c"] = stats.crc.tolist()
                    write_provenance(table_path, pa.table(columns, PROVENANCE))
                    report.entry = ShardEntry.of_file(path, samples=stats.samples, first_uid=stats.first_uid)
                    progress.alive()
            report.seconds = round(time.monotonic() - started, 3)
            if report.rejected:
                with self.output.staged_state(Output.rejects_name(self.index)) as rejects_path:
                    write_rejects(rejects_path, [pa.table(rejects, REJECTS)])
            self.output.mark_done(report.to_json(), self.index)
        except OSError as error:
            where = error.filename or self.output.place(self.split)
            raise DataError(f"{where}: cannot be written ({error.strerror or error})") from error
        return report

    def _samples(
        self, report: ShardReport, columns: dict[str, list[Any]], rejects: dict[str, list[str]], progress: Progress
    ) -> Iterator[StoredSample]:
        """The samples that can be stored; the rest goes to the report. One image in memory at a time."""
        uids, keys, labels, parts, contents = (self.rows.column(name) for name in self.rows.schema.names)
        for position in range(self.rows.num_rows):
            key, uid = keys[position].as_py(), uids[position].as_py()
            image = self._image(position, parts[position].as_py(), contents[position].as_py(), report)
            if isinstance(image, Reject):
                rejects["key"].append(_printable(key))
                rejects["reason"].append(_printable(image.reason))
                report.rejected += 1
                progress.advance(rejected=True)
                continue
            stored, sha256 = image
            report.passed_through += stored.passed_through
            report.transcoded += not stored.passed_through
            of_image = labels[position].as_py()
            for name, value in (
                ("uid", uid),
                ("key", _printable(key)),
                ("labels", of_image),
                ("height", stored.height),
                ("width", stored.width),
                ("size", len(stored.jpeg)),
                ("sha256", sha256),
                ("passed_through", stored.passed_through),
            ):
                columns[name].append(value)
            first = of_image[0] if of_image else NO_LABEL
            several = np.array(of_image, np.int32) if self.several_labels else None
            yield StoredSample(stored.jpeg, stored.height, stored.width, first, uid, several)
            progress.advance()

    def _image(self, position: int, part: int, content: bytes, report: ShardReport) -> Any:
        """An image as it is stored, and the SHA-256 of its source; or why not."""
        try:
            if position in self.refused:
                raise ChildProcessError(self.refused[position])
            data = _read(self.reader, part, content)
            stored = store_image(data, self.options)
        except (OSError, MemoryError) as error:
            report.unread += 1
            report.unsteady += not isinstance(error, _STEADY)
            why = error.strerror or str(error) if isinstance(error, OSError) else "not enough memory"
            return Reject(f"cannot be read: {why}")
        return stored if isinstance(stored, Reject) else (stored, hashlib.sha256(data).digest())


def _read(reader: Reader, part: int, content: bytes) -> bytes:
    """An image's bytes, at the second try if need be."""
    try:
        return reader.read(part, content)
    except _STEADY:
        raise
    except OSError:
        time.sleep(_PAUSE)
        return reader.read(part, content)


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.beton"


def _write(path: Path, samples: Iterator[StoredSample], capacity: int) -> ShardStats | None:
    """Write the shard, unless there is not a single sample."""
    first = next(samples, None)
    if first is None:
        return None

    def all_samples() -> Iterator[StoredSample]:
        yield first
        yield from samples

    return write_shard(path, all_samples(), capacity)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
