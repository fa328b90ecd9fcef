"""Shuffles all images: sorts them on disk by the hash of their keys.

Images are sorted by (XXH3-64 of the key, key), the hash seeded by the shuffle's seed. The permutation depends on keys
and seed only, and added images do not change the order of the others. Images are dealt into buckets by the hash's
first bits, and one bucket after another is sorted in memory.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.classes import PathStatistics, Vocabulary, order_classes, refuse_splits
from data_tools.listing import PartSummary, order_hash, read_listing
from data_tools.sources.source import Source
from vitscale.ground.errors import DataError

ORDERED = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
    ]
)
# With the key's hash, the position in the listing, and provisional numbers as labels.
_DEALT = pa.schema(
    [pa.field("hash", pa.uint64(), nullable=False), pa.field("number", pa.int64(), nullable=False), *ORDERED]
)
_BUCKET_ROWS = 1 << 14
_MAX_BUCKETS = 512  # all of their files are open at once

REPLACED = "replaced later in the archive"


@dataclass(frozen=True)
class Ordered:
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
    total = sum(summary.images for summary in summaries)
    if not total:
        seen = ", ".join(f"{count:,} {reason}" for reason, count in sorted(ignored.items())) or "nothing"
        raise DataError(f"{where}: no images in the source (found: {seen})")
    explicit = any(summary.explicit for summary in summaries)
    depth = None
    if not explicit:
        paths = PathStatistics.merged(summary.paths for summary in summaries)
        depth = paths.common_depth() if unlabelled else paths.class_depth(frozenset(known_classes or ()))
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
