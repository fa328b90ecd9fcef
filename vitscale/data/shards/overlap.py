"""Compares two datasets: how many samples they have in common, and whether one is a view of the other."""

from typing import NamedTuple

import numpy as np

from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.opening import open_shard_file
from vitscale.ground.storage import is_url

LARGEST_BY_BYTES = 1 << 24
"""The number of samples in a dataset beyond which bytes are not compared: each 100,000 take 0.2 s."""


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
