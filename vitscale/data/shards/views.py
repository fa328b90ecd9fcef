"""Tells whether a dataset is a view of another one: some of its samples, in the same shards."""

import numpy as np

from vitscale.data.shards.manifest import Manifest


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
