"""Facts about a dataset: what its manifest says, and, from its shards, samples per class and bytes of images."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from vitscale.data.shards.beton import NO_LABEL
from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError


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
