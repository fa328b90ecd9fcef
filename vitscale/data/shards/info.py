"""Facts about datasets: manifest, samples per class and bytes of images; how many samples two have in common."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from vitscale.data.shards.beton import NO_LABEL
from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.opening import open_shard, open_shard_file
from vitscale.ground.errors import DataError
from vitscale.ground.storage import is_url

LARGEST_BY_BYTES = 1 << 24
"""The number of samples in a dataset beyond which bytes are not compared: each 55,000 take 0.2 s."""


def describe(manifest: Manifest) -> dict[str, Any]:
    """The facts that `vitscale shards info` prints, by name; byte counts are those of whole files."""
    shards = manifest.shards
    stored = sum(shard.samples for shard in shards)
    size = sum(shard.bytes for shard in shards)
    by_size = sorted(shards, key=lambda shard: shard.bytes)
    return {
        "manifest": manifest.where,
        "sha256": manifest.sha256,
        "schema_version": manifest.schema_version,
        "samples": manifest.num_samples,
        "stored_samples": stored,
        "classes": len(manifest.class_names),
        "fields": list(manifest.fields),
        "shards": len(shards),
        "selecting_shards": sum(shard.select != "all" for shard in shards),
        "bytes": size,
        "mean_bytes_per_sample": round(size / stored) if stored else 0,
        "largest_shard": {"path": by_size[-1].path, "bytes": by_size[-1].bytes} if shards else None,
        "smallest_shard": {"path": by_size[0].path, "bytes": by_size[0].bytes} if shards else None,
        "rejected": manifest.num_rejected,
        "removed": manifest.num_removed,
        "shuffle_seed": manifest.shuffle_seed,
        "options": manifest.options,
    }


class Census(NamedTuple):
    """Counts over the selected samples of a dataset; `image_bytes` are those of all images, without their shards' rest.

    `classes` has the samples of each class, in the classes' order; one with several labels counts in each.
    """

    classes: dict[str, int]
    unlabelled: int
    image_bytes: int


def census(manifest: Manifest) -> Census:
    """Count the samples of a dataset. Raises DataError and StorageError."""
    counts: Counter[int] = Counter()
    image_bytes = 0
    for index in range(len(manifest.shards)):
        with open_shard(manifest, index, with_keys=False) as shard:
            image_bytes += int(shard.file.size[shard.slots].sum())
            if shard.file.has_several_labels:
                for slot in shard.slots.tolist():
                    counts.update(shard.labels(slot) or [NO_LABEL])
            else:
                labels, times = np.unique(shard.file.label[shard.slots], return_counts=True)
                counts.update(dict(zip(labels.tolist(), times.tolist(), strict=True)))
    unlabelled = counts.pop(NO_LABEL, 0)
    named = {name: counts.pop(label, 0) for label, name in enumerate(manifest.class_names)}
    if counts:
        raise DataError(
            f"{manifest.where}: {len(named):,} classes, but samples of class {max(counts):,}, counted from 0"
        )
    return Census(named, unlabelled, image_bytes)


class Overlap(NamedTuple):
    """The number of a dataset's samples that another one also has."""

    stored: int  # in slots of a shard that both select
    equal: int | None  # others whose stored image has the size and CRC-32C of one there; None if not compared


def overlap(dataset: Manifest, other: Manifest) -> Overlap:
    """Count the samples of `dataset` that are also in `other`.

    Bytes are compared by the sizes and checksums in the shards' own tables, for datasets on this machine with at most
    16.8 million samples. Copies that are stored as different bytes are what `vitscale dedup` finds.

    Raises `DataError` for shards and lists of slots that are missing or damaged, `StorageError` for a URL that does not
    answer.
    """
    number_of = {entry.sha256: number for number, entry in enumerate(other.shards)}
    stored = 0
    for index, entry in enumerate(dataset.shards):
        if entry.sha256 in number_of:
            stored += len(np.intersect1d(dataset.slots(index), other.slots(number_of[entry.sha256]), True))
    if any(is_url(one.where) or one.num_samples > LARGEST_BY_BYTES for one in (dataset, other)):
        return Overlap(stored, None)
    return Overlap(stored, int(np.isin(_contents(dataset), _contents(other)).sum()) - stored)


def _contents(dataset: Manifest) -> np.ndarray:
    """Size and CRC-32C of every selected image, packed into one number, uint64 (num_samples,)."""
    packed = [np.empty(0, np.uint64)]
    for index in range(len(dataset.shards)):
        slots = dataset.slots(index)
        with open_shard_file(dataset, index, dataset.shard_path(index)) as file:
            packed.append((file.size.astype(np.uint64) << np.uint64(32) | file.crc)[slots])
    return np.concatenate(packed)


def why_no_view(view: Manifest, whole: Manifest) -> str | None:
    """What a dataset has that another one lacks, in words; None if all its samples are in the other.

    Shards are compared by their digests, and selections slot by slot if they differ. Raises `DataError` as
    `Manifest.selected_slots` does.
    """
    if view.class_names != whole.class_names:
        return "its classes differ"
    number_of = {shard.first_uid: number for number, shard in enumerate(whole.shards)}
    for number, shard in enumerate(view.shards):
        other = number_of.get(shard.first_uid)
        if other is None or whole.shards[other].sha256 != shard.sha256:
            return f"{shard.path} is not one of its shards"
        if shard.select == whole.shards[other].select or whole.shards[other].select == "all":
            continue
        if len(added := np.setdiff1d(view.slots(number), whole.slots(other))):
            return f"{len(added):,} samples of {shard.path}, the first in slot {int(added[0])}, are left out there"
    return None
