"""The order of a conversion: which image goes into which shard, decided before the first is stored.

Images are sorted by (XXH3-64 of the key, key), with the shuffle's seed: a permutation that depends on keys and seed
alone, and that stays as it is for the others when images are added. The sort is done on disk: images are dealt into
buckets by the first bits of the hash, and one bucket after the other is sorted in memory.

    plan-00.arrow    of the first split: batch i holds the images of shard i: uid, key, labels, part, content
    plan.json        splits, classes, counts, and a digest of it all; written last: the plan is complete
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.classes import Vocabulary, order_classes
from data_tools.listing import PartSummary, order_hash, read_listing
from data_tools.paths import PathStatistics
from data_tools.sources.source import Source
from data_tools.splits import SplitRule, Takes, choosers
from vitscale.durable import durable_file, write_text
from vitscale.errors import DataError

PLAN = pa.schema(
    [
        pa.field("uid", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
    ]
)
_DEALT = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),  # in the order of the listing
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),  # provisional numbers
        pa.field("part", pa.int32(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
    ]
)
_BUCKET_ROWS = 1 << 18
_MAX_BUCKETS = 512  # as many files are open at once
_DEALT_ROWS = 1 << 18

REPLACED = "replaced later in the archive"
LEFT_OUT = "in none of the splits"


@dataclass(frozen=True)
class PlannedSplit:
    """One data set of the plan: its name (empty for the only one), images, shards, and the manifest's options."""

    name: str
    images: int
    shards: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is to be done. `sha256` is over keys, labels and order of all images."""

    folder: Path
    splits: tuple[PlannedSplit, ...]
    class_names: tuple[str, ...]
    several_labels: bool
    shard_samples: int
    shuffle_seed: int
    ignored: dict[str, int]
    sha256: str

    @property
    def images(self) -> int:
        return sum(split.images for split in self.splits)

    @property
    def tasks(self) -> int:
        """Shards of all splits; a task's number counts through them in order."""
        return sum(split.shards for split in self.splits)

    def place(self, task: int) -> tuple[PlannedSplit, int]:
        """The split of a task, and the number of its shard there."""
        for split in self.splits:
            if task < split.shards:
                return split, task
            task -= split.shards
        raise IndexError(task)

    def images_of(self, task: int) -> int:
        """How many images a task has."""
        split, shard = self.place(task)
        return min(self.shard_samples, split.images - shard * self.shard_samples)

    def rows(self, tasks: Iterable[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The images of each task, one task in memory at a time."""
        with ExitStack() as files:
            readers = {
                split.name: pa.ipc.open_file(files.enter_context(pa.OSFile(str(_plan_file(self.folder, i)))))
                for i, split in enumerate(self.splits)
                if split.shards
            }
            for task in tasks:
                split, shard = self.place(task)
                yield task, readers[split.name].get_batch(shard)

    @classmethod
    def load(cls, folder: Path) -> "Plan | None":
        """The plan in a folder, or None if there is no complete one."""
        try:
            return cls.from_json(json.loads((folder / "plan.json").read_text("utf-8")), folder)
        except FileNotFoundError:
            return None

    @classmethod
    def from_json(cls, content: dict[str, Any], folder: Path) -> "Plan":
        """What `described` gave."""
        splits = tuple(PlannedSplit(**split) for split in content["splits"])
        return cls(**content | {"folder": folder, "splits": splits, "class_names": tuple(content["class_names"])})

    def described(self) -> dict[str, Any]:
        """The plan without its images, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


@dataclass(frozen=True)
class Ordered:
    """All images of a source in the order of the shuffle, in batches of `PLAN` without uids, and their classes."""

    batches: Iterator[pa.RecordBatch]
    class_names: tuple[str, ...]
    several_labels: bool
    ignored: Counter[str]


def order_images(
    source: Source, listing: Path, seed: int, known_classes: tuple[str, ...] | None, *, unlabelled: bool = False
) -> Ordered:
    """Sort the images of a complete listing.

    Args:
        source: what was listed.
        listing: folder of the list of each part; the buckets go there too, and away again.
        seed: of the shuffle.
        known_classes: all classes in order; None for those found, or as the source has them.
        unlabelled: whatever the source says, no image has a label.

    Raises:
        DataError: no images; images outside of class folders; classes that are not known; one key twice.
    """
    summaries = [_summary(listing, part) for part in range(len(source.parts))]
    ignored = sum((Counter(summary.ignored) for summary in summaries), Counter())
    total = sum(summary.images for summary in summaries)
    if not total:
        seen = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ignored.items())) or "nothing"
        raise DataError(f"no images in the source (found: {seen})")
    explicit = any(summary.explicit for summary in summaries)
    depth = None
    if not unlabelled and not explicit:
        depth = PathStatistics.merged(summary.paths for summary in summaries).class_depth(
            frozenset(known_classes or ())
        )
    vocabulary = Vocabulary()
    buckets = _deal(summaries, listing, seed, vocabulary, depth, unlabelled)
    class_names: tuple[str, ...] = ()
    label_of = np.empty(0, np.int32)
    if not unlabelled:
        class_names, label_of = order_classes(
            vocabulary.names, source.class_names, known_classes, from_folders=depth is not None
        )
    several = not unlabelled and any(summary.several_labels for summary in summaries)
    return Ordered(_sorted(buckets, label_of, source, explicit, ignored), class_names, several, ignored)


def _summary(listing: Path, part: int) -> PartSummary:
    summary = PartSummary.load(listing, part)
    assert summary is not None, f"part {part} was not listed"
    return summary


def _deal(
    summaries: list[PartSummary],
    listing: Path,
    seed: int,
    vocabulary: Vocabulary,
    depth: int | None,
    unlabelled: bool,
) -> list[Path]:
    """Append every image to the bucket of its hash. `depth`: of the class folder, None for explicit labels."""
    total = sum(summary.images for summary in summaries)
    count = min(_MAX_BUCKETS, -(-total // _BUCKET_ROWS))
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
                if depth is None:
                    labels = _renumbered(batch.column("labels"), numbers, unlabelled)
                else:
                    split = [key.split("/", depth + 1) for key in keys]
                    classes = np.array([vocabulary.number(parts[depth]) for parts in split], np.int32)
                    labels = pa.ListArray.from_arrays(np.arange(len(keys) + 1, dtype=np.int32), pa.array(classes))
                    if depth:
                        keys = ["/".join(parts[depth:]) for parts in split]
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
                dealt = pa.record_batch(columns, schema=_DEALT)
                # (hash >> 32) * count >> 32 is which of `count` equal ranges the hash lies in.
                bucket = ((hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)
                order = np.argsort(bucket, kind="stable")
                dealt = dealt.take(pa.array(order))
                ends = np.cumsum(np.bincount(bucket, minlength=count))
                for i, end in enumerate(ends.tolist()):
                    start = ends[i - 1] if i else 0
                    if end > start:
                        writers[i].write_batch(dealt.slice(start, end - start))
    return paths


def _renumbered(labels: pa.ListArray, numbers: np.ndarray, unlabelled: bool) -> pa.ListArray:
    """Labels in the common vocabulary instead of the part's own; none at all for unlabelled images."""
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
        order = pc.sort_indices(table, [("hash", "ascending"), ("key", "ascending"), ("number", "ascending")])
        table = table.take(order)
        if table.num_rows:
            table = _once(table, source, explicit, ignored)
            labels = table.column("labels").combine_chunks()
            labels = _renumbered(labels, label_of, unlabelled=False)
            columns = [table.column("key"), labels, table.column("part"), table.column("content")]
            uid = pa.array(np.zeros(table.num_rows, np.int64))
            yield from pa.table([uid, *columns], schema=PLAN).combine_chunks().to_batches()
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
                f"{key!r} occurs twice, in {places}. Every image needs a name of its own; several labels of one image "
                "stand in one record"
            )
        dropped.append(i)
    if not dropped:
        return table
    ignored[REPLACED] += len(dropped)
    keep = np.ones(table.num_rows, bool)
    keep[dropped] = False
    return table.filter(pa.array(keep))


def write_plan(
    ordered: Ordered,
    batches: Iterator[pa.RecordBatch],
    folder: Path,
    rules: tuple[SplitRule, ...],
    *,
    shard_samples: int,
    limit: int | None,
    seed: int,
    options: dict[str, dict[str, Any]],
) -> Plan:
    """Deal the images to splits and shards, and write it down.

    Args:
        ordered: what the images are; they themselves come from `batches`, once.
        batches: the images in order.
        folder: where the plan goes.
        rules: of the splits; none for a single data set.
        shard_samples: images a shard.
        limit: images to take at most, from the first.
        seed: of the shuffle.
        options: what the manifest of each split will say.

    Raises:
        DataError: a split without images.
        OSError: the disk's own errors.
    """
    splits = choosers(rules, seed)
    rules = rules or (SplitRule("", "rest"),)
    digest = hashlib.sha256()
    taken = 0
    with ExitStack() as files:
        sinks = [
            _ShardWriter(files.enter_context(durable_file(_plan_file(folder, i))), shard_samples, digest, i)
            for i in range(len(rules))
        ]
        for batch in batches:
            if limit is not None:
                batch = batch.slice(0, limit - taken)
            if not batch.num_rows:
                break
            taken += batch.num_rows
            if not splits:
                sinks[0].add(batch)
                continue
            choice = _choose(batch, splits)
            ordered.ignored[LEFT_OUT] += int(np.count_nonzero(choice < 0))
            for i, sink in enumerate(sinks):
                rows = np.flatnonzero(choice == i)
                if len(rows):
                    sink.add(batch.take(pa.array(rows)))
        for sink in sinks:
            sink.close()
    for sink, rule in zip(sinks, rules, strict=True):
        if not sink.images:
            raise DataError(f"--split {rule}: no image belongs to it")
    plan = Plan(
        folder=folder,
        splits=tuple(
            PlannedSplit(rule.name, sink.images, sink.shards, options[rule.name])
            for rule, sink in zip(rules, sinks, strict=True)
        ),
        class_names=ordered.class_names,
        several_labels=ordered.several_labels,
        shard_samples=shard_samples,
        shuffle_seed=seed,
        ignored=dict(+ordered.ignored),
        sha256=digest.hexdigest(),
    )
    write_text(folder / "plan.json", json.dumps(plan.described(), indent=1))
    return plan


def _choose(batch: pa.RecordBatch, splits: list[Takes]) -> np.ndarray:
    """The split of each image, -1 for none; of several the first."""
    keys = batch.column("key").to_pylist()
    choice = np.full(len(keys), -1)
    for row, key in enumerate(keys):
        choice[row] = next((i for i, takes in enumerate(splits) if takes(key)), -1)
    return choice


class _ShardWriter:
    """Batches of any size in, batches of one shard each out."""

    def __init__(self, file: object, shard_samples: int, digest: "hashlib._Hash", number: int) -> None:
        self.images = self.shards = 0
        self._writer = pa.ipc.new_file(file, PLAN)
        self._size, self._digest, self._number = shard_samples, digest, number
        self._held: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            piece = batch.slice(0, self._size - self._rows)
            batch = batch.slice(piece.num_rows)
            self._held.append(piece)
            self._rows += piece.num_rows
            if self._rows == self._size:
                self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        shard = pa.Table.from_batches(self._held).combine_chunks().to_batches()[0]
        uid = pa.array(np.arange(self.images, self.images + shard.num_rows))
        shard = pa.record_batch([uid, *shard.columns[1:]], schema=PLAN)
        self._writer.write_batch(shard)
        self._digest.update(f"{self._number} {shard.num_rows}\n".encode())
        self._digest.update("\0".join(shard.column("key").to_pylist()).encode("utf-8", "surrogatepass"))
        for labels in (pc.list_value_length(shard.column("labels")), shard.column("labels").flatten()):
            self._digest.update(labels.to_numpy(zero_copy_only=False).astype("<i4").tobytes())
        self.images += shard.num_rows
        self.shards += 1
        self._held, self._rows = [], 0


def _plan_file(folder: Path, split: int) -> Path:
    return folder / f"plan-{split:02d}.arrow"
