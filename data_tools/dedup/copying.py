"""Removes the copies that `find` found: writes new shards without them. The dataset is not changed.

A killed copy can be continued: it begins with a note of what it copies, every finished shard gets a marker, and the
manifest is written last.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.dedup.applying import Removal
from data_tools.engines.task import Progress, Run, Tick
from data_tools.finishing import reports_of
from data_tools.leaving_out import slots_without
from data_tools.locks import ALL_TASKS, claimed
from data_tools.output import CONVERSION_NAME, Output
from data_tools.shard_task import ShardReport, shard_name
from vitscale import storage
from vitscale.errors import DataError, RecipeError
from vitscale.files.durable import durable_file
from vitscale.shards import MANIFEST_NAME, Manifest, ShardEntry, StoredSample, write_shard
from vitscale.shards.decisions import DECISIONS_NAME
from vitscale.shards.opening import OpenShard, known_manifest, local_copy, open_shard
from vitscale.shards.provenance import REJECTS_NAME, provenance_path, read_provenance, write_tables

_VERSION = "dedup apply 1"  # unlike a conversion's number, so that a conversion does not try to continue this


def write_copy(removal: Removal, out: str, run: Run, tick: Tick = lambda done, rejected: None) -> Manifest:
    """Write the remaining samples as a dataset of its own; or continue doing so.

    Samples keep their uids, checksums and rows of provenance; shards left without samples are not written.

    Args:
        removal: the samples to remove.
        out: a new or empty folder, or a URL.
        run: runs the tasks, one per shard.
        tick: called several times a second with the number of samples done.

    Raises:
        RecipeError: an `out` that cannot be used.
        DataError: a shard that is missing or damaged; a disk that refuses.
        StorageError: a URL that does not answer.
    """
    output = Output.at(out, None)
    note = json.dumps({"version": _VERSION, "dataset": removal.manifest.sha256, "found": removal.sha256})
    try:
        output.refuse_foreign([""])
        (output.work / "locks").mkdir(parents=True, exist_ok=True)
        with claimed(output.work / "locks", ALL_TASKS):
            begun = output.read_state(CONVERSION_NAME)
            if begun not in (None, note.encode()):
                raise RecipeError(f"OUT {out}: holds another dataset, unfinished. Remove it, or choose another folder")
            if output.is_complete([""]):  # killed in its last moments
                output.clear_state([""])
                return Manifest.load(out)
            output.mark(CONVERSION_NAME, note)
            return _copy(removal, output, run, tick)
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from error


def _copy(removal: Removal, output: Output, run: Run, tick: Tick) -> Manifest:
    manifest, shards = removal.manifest, list(removal.remaining())
    reports = reports_of(output, range(len(shards)))
    tasks = (
        _Task(number, index, manifest.where, manifest.sha256, removal.of_shard(index), output)
        for number, index in enumerate(shards)
        if number not in reports
    )
    for report in run(tasks, tick):
        reports[report.task] = report
    rejects = manifest.location(REJECTS_NAME)
    if storage.size_of(rejects) is not None:
        _put(output, REJECTS_NAME, storage.read_bytes(rejects))
    _put(output, DECISIONS_NAME, removal.all_decisions())
    entries = [entry for number in range(len(shards)) if (entry := reports[number].entry) is not None]
    with output.staged("", [MANIFEST_NAME]) as (path,):
        removal.new_manifest(entries).save(path.parent)
    output.clear_state([""])
    return Manifest.load(output.where)


def _put(output: Output, name: str, content: bytes) -> None:
    with output.staged("", [name]) as (path,), durable_file(path) as file:
        file.write(content)


@dataclass(frozen=True)
class _Task:
    """One shard to write anew.

    Attributes:
        number: number of the new shard; names its files.
        index: index of the old shard in the manifest.
        manifest, sha256: the manifest's path or URL, and its digest.
        uids: uids of the samples to remove.
        output: where the shard goes.
    """

    number: int
    index: int
    manifest: str
    sha256: str
    uids: np.ndarray
    output: Output

    @property
    def name(self) -> str:
        return f"shard {self.number}"

    def describe(self, position: int) -> str:
        """What messages call the image at a position."""
        return f"image {position:,} of {self.name}"

    def without(self, position: int, reason: str) -> None:
        """None: no sample may be left out unnoticed."""
        return None

    def run(self, progress: Progress) -> ShardReport:
        """Raises DataError: a shard that is damaged, or a disk that refuses; StorageError."""
        manifest, name = known_manifest(self.manifest, self.sha256), shard_name(self.number)
        try:
            with (
                open_shard(manifest, self.index, with_keys=False) as shard,
                self.output.staged("", [name, provenance_path(name)]) as (path, table_path),
            ):
                slots = slots_without(shard.slots, shard.file.uid, self.uids, str(shard.file.path))
                stats = write_shard(path, _samples(shard, slots, progress), len(slots))
                progress.alive()
                _copy_table(manifest, self.index, slots, table_path)
                entry = ShardEntry.of_file(path, samples=stats.samples, first_uid=stats.first_uid)
            report = ShardReport(self.number, "", entry)
            self.output.mark_done(report.to_json(), self.number)
        except OSError as error:
            where = error.filename or self.output.where
            raise DataError(f"{where}: cannot be written ({error.strerror or error})") from error
        return report


def _samples(shard: OpenShard, slots: np.ndarray, progress: Progress) -> Iterator[StoredSample]:
    """The samples of some slots, verified, one in memory at a time."""
    file = shard.file
    with_labels = file.has_several_labels
    if file.raw[slots].any():
        raise DataError(
            f"{file.path}: {int(file.raw[slots].sum()):,} images are stored as raw pixels, which vitscale's shards "
            "cannot hold. Write a view (without --copy), or make JPEGs of the dataset with vitscale-convert first"
        )
    for slot in slots.tolist():
        labels = np.array(shard.labels(slot), np.int32) if with_labels else None
        facts = (int(file.height[slot]), int(file.width[slot]), int(file.label[slot]), int(file.uid[slot]))
        yield StoredSample(shard.image(slot), *facts, labels)
        progress.advance()


def _copy_table(manifest: Manifest, index: int, slots: np.ndarray, out: Path) -> None:
    """Copy the provenance rows of some slots, if there is a table, of whatever version."""
    entry = manifest.shards[index]
    where = provenance_path(manifest.location(entry.path))
    if storage.size_of(where) is None:
        return
    with local_copy(where) as path:
        table = read_provenance(path)
    if table.num_rows != entry.samples:
        raise DataError(f"{where}: {table.num_rows:,} rows; the manifest says {entry.samples:,} samples")
    write_tables(out, [table.take(slots)], table.schema)
