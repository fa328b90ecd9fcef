"""The order of a conversion: which image goes into which shard, decided before the first is read."""

from collections.abc import Sequence

import numpy as np
import xxhash


def shuffled(keys: Sequence[str], seed: int) -> np.ndarray:
    """A permutation of images that depends on their keys and the seed alone.

    Args:
        keys: unique, sorted.
        seed: in [0, 2**64).

    Returns:
        int64 (len(keys),): the image at each position. A position is the sample's uid. The order is by (XXH3-64 of the
        key, key), so that adding images leaves the order of the others as it is.
    """
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(key.encode(), seed) for key in keys), np.uint64, len(keys))
    return np.argsort(hashes, kind="stable")


def shard_ranges(samples: int, shard_samples: int) -> list[range]:
    """Positions that each shard takes: `shard_samples` each, fewer in the last."""
    return [range(start, min(start + shard_samples, samples)) for start in range(0, samples, shard_samples)]
