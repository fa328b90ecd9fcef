"""One worker's task: turns the images of one shard into the shard and its table of provenance.

A task depends only on its arguments, not on other shards, and can be repeated. Its marker, written last, marks it as
done; a killed task leaves only files under temporary names.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from data_tools.dedup.against import Comparison, NamedIndex, open_matcher
from data_tools.dedup.fingerprint import ALGORITHM
from data_tools.dedup.queries import Candidate
from data_tools.listing import Spool
from data_tools.output import Output, SplitName
from data_tools.sources.source import Source, without_surrogates
from data_tools.tasks import Progress, Task
from vitscale.data.shards import ShardEntry
from vitscale.data.shards.beton import NO_LABEL, StoredSample, write_shard
from vitscale.data.shards.images import ImageOptions, Reject, TooLarge, store_image
from vitscale.data.shards.provenance import (
    DECISIONS,
    PROVENANCE,
    REJECTS,
    provenance_path,
    write_provenance,
    write_tables,
)
from vitscale.ground.errors import DataError

# Errors that a second try would not cure: the file is missing, or we may not read it.
_STEADY = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PAUSE = 1.0  # seconds


@dataclass
class ShardReport:
    """The result of a task, stored in its marker."""

    task: int  # its number in the plan
    split: SplitName
    entry: ShardEntry | None = None  # the shard's entry in the manifest; None if no image was left
    passed_through: int = 0  # samples stored with the source's bytes
    transcoded: int = 0  # samples stored as a new JPEG
    unlabelled: int = 0  # samples without a label
    rejected: int = 0  # images that could not be stored
    unread: int = 0  # those of the rejected that could not even be read, or on which workers died
    unsteady: int = 0  # those of the unread that another try may read
    removed: int = 0  # images left out as copies of test images
    decisions: int = 0  # rows in the table of removed images and near misses
    seconds: float = 0.0  # time taken

    def to_json(self) -> str:
        content = asdict(self) | {"entry": self.entry and self.entry.model_dump(mode="json")}
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ShardReport":
        return _REPORT.validate_json(text)


_REPORT = TypeAdapter(ShardReport)


@dataclass(frozen=True)
class ShardTask(Task):
    """One shard to write."""

    index: int  # the task's number in the plan
    split: str  # name of the dataset that the shard belongs to; empty if there are no splits
    shard: int  # the shard's number within the split; names its files
    rows: pa.RecordBatch  # the images, of schema `planning.PLAN`
    reader: Source | Spool  # reads their bytes
    output: Output  # where the shard is written
    options: ImageOptions  # how images are stored
    several_labels: bool  # whether samples have a list of labels
    dedup: tuple[NamedIndex, ...] = ()  # indexes of test sets whose copies are left out
    refused: dict[int, str] = field(default_factory=dict)  # how workers died on an image, by its position

    @property
    def name(self) -> str:
        return f"shard {self.shard}" + (f" of {self.split}" if self.split else "")

    def describe(self, position: int) -> str:
        if position >= self.rows.num_rows:
            return f"the end of {self.name}"
        return repr(self.rows.column("key")[position].as_py())

    def without(self, position: int, reason: str) -> "ShardTask | None":
        """The task with one image rejected; None if the position is behind the last image."""
        return None if position >= self.rows.num_rows else replace(self, refused=self.refused | {position: reason})

    def run(self, progress: Progress) -> ShardReport:
        """Write shard, provenance, marker. Raises DataError if the disk fails or an index has changed, StorageError."""
        started = time.monotonic()
        report = ShardReport(self.index, self.split)
        comparison = Comparison(open_matcher(self.dedup)) if self.dedup else None
        columns: dict[str, list[Any]] = {name: [] for name in PROVENANCE.names}
        rejects: dict[str, list[str]] = {name: [] for name in REJECTS.names}
        output, name = self.output, shard_name(self.shard)
        files = [output.place(self.split, file) for file in (name, provenance_path(name))]
        try:
            with output.staged(*files) as (path, table_path):
                images = self._images(report, rejects, progress)
                kept = images if comparison is None else comparison.kept(images)
                samples = self._samples(kept, report, columns)
                first = next(samples, None)
                if first is not None:
                    stats = write_shard(path, chain([first], samples), self.rows.num_rows)
                    progress.alive()
                    columns["crc32c"] = stats.crc.tolist()
                    write_provenance(table_path, pa.table(columns, PROVENANCE), ALGORITHM)
                    report.entry = ShardEntry.of_file(path, samples=stats.samples, first_uid=stats.first_uid)
                    progress.alive()
            report.seconds = round(time.monotonic() - started, 3)
            if report.rejected:
                with output.staged(output.of_task(self.index, "rejects.parquet")) as (path,):
                    write_tables(path, [pa.table(rejects, REJECTS)], REJECTS)
            if comparison is not None:
                decisions, findings = comparison.decisions(), comparison.findings
                report.removed, report.decisions = findings.removed, decisions.num_rows
                if report.decisions:
                    with output.staged(output.of_task(self.index, "dedup.parquet")) as (path,):
                        write_tables(path, [decisions], DECISIONS)
                output.write(output.of_task(self.index, "dedup.json"), json.dumps(findings.to_json()))
            output.write(output.of_task(self.index, "json"), report.to_json())
        except OSError as error:
            where = error.filename or output.place(self.split)
            raise DataError(f"{where}: cannot be written ({error.strerror or error})") from error
        return report

    def _images(self, report: ShardReport, rejects: dict[str, list[str]], progress: Progress) -> Iterator[Candidate]:
        """The images that can be stored, one at a time; the others are added to `rejects` and counted in the report."""
        for position in range(self.rows.num_rows):
            row = self.rows.slice(position, 1).to_pylist()[0]
            row["key"] = without_surrogates(row["key"])
            image = self._image(position, row, report)
            if isinstance(image, Reject):
                rejects["key"].append(row["key"])
                rejects["reason"].append(without_surrogates(image.reason))
                report.rejected += 1
                progress.advance(rejected=True)
            else:
                yield image
                progress.advance()

    def _samples(
        self, images: Iterable[Candidate], report: ShardReport, columns: dict[str, list[Any]]
    ) -> Iterator[StoredSample]:
        """Images as samples; their provenance is appended to `columns`."""
        for image in images:
            report.passed_through += image.passed_through
            report.transcoded += not image.passed_through
            report.unlabelled += not image.labels
            facts = vars(image) | {"size": len(image.jpeg), "pdq_quality": image.quality}
            for name in columns.keys() - {"crc32c"}:  # which is known when the shard is written
                columns[name].append(facts[name])
            first = image.labels[0] if image.labels else NO_LABEL
            several = np.array(image.labels, np.int32) if self.several_labels else None
            yield StoredSample(image.jpeg, image.height, image.width, first, image.uid, several)

    def _image(self, position: int, row: dict[str, Any], report: ShardReport) -> Candidate | Reject:
        """The image of a row of the plan, or why it cannot be stored."""
        try:
            if position in self.refused:
                raise ChildProcessError(self.refused[position])
            data = _read(self.reader, row["part"], row["content"])
            stored = store_image(data, self.options)
            if isinstance(stored, Reject):
                return stored
            return Candidate.of(stored, data, row["uid"], row["key"], row["labels"])
        except TooLarge as error:
            return Reject(str(error))
        except (OSError, MemoryError) as error:
            report.unread += 1
            report.unsteady += not isinstance(error, _STEADY)
            why = error.strerror or str(error) if isinstance(error, OSError) else "not enough memory"
            return Reject(f"cannot be read: {why}")


def _read(reader: Source | Spool, part: int, content: bytes) -> bytes:
    """An image's bytes; tries a second time after most errors."""
    try:
        return reader.read(part, content)
    except (*_STEADY, TooLarge):
        raise
    except OSError:
        time.sleep(_PAUSE)
        return reader.read(part, content)


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.beton"
