"""Which sample stands where in training: a function of (shards, global batch, seed, step), never a stored permutation.

Per epoch the shards are permuted and concatenated; the sequence is cut into S equal contiguous segments, each shuffled
inside windows; each segment fills G / S slots of every global batch of G samples. Any step is reached at the cost of
the windows it lies in, and the state of the order is the step alone.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from vitscale.data.hashing import permutation
from vitscale.errors import DataError

ORDER_VERSION = 1
MAX_SEGMENTS = 128
WINDOW_SAMPLES = 65_536

# What a hash is for, so that no two permutations share their keys.
_SHARDS, _WINDOW = 1, 2


class Slots(NamedTuple):
    """Samples of consecutive slots of one global batch.

    `shard` and `position` are int64 (slots,): the index of the shard, and the place among its selected samples. Where
    `mask` (slots,) is False the slot is a filler.
    """

    epoch: int
    shard: np.ndarray
    position: np.ndarray
    mask: np.ndarray


class TrainOrder:
    """The order of training, without end: epoch after epoch.

    Args:
        shard_samples: selected samples of every shard.
        global_batch: G, samples a step.
        seed: of the shuffle.

    Raises:
        DataError: fewer samples than one global batch.
    """

    def __init__(self, shard_samples: Sequence[int], global_batch: int, seed: int) -> None:
        samples = np.asarray(shard_samples, np.int64)
        self.num_samples = int(samples.sum())
        self.global_batch = global_batch
        if self.num_samples < global_batch:
            raise DataError(
                f"the dataset has {self.num_samples} samples, fewer than one global batch of {global_batch}; "
                f"use a smaller batch.global"
            )
        self.segments = num_segments(len(shard_samples), global_batch)
        self._per_segment = global_batch // self.segments
        self._segment_length = self.num_samples // self.segments
        self.steps_per_epoch = self._segment_length // self._per_segment
        windows = -(-self._segment_length // WINDOW_SAMPLES)
        self._bounds = np.arange(windows + 1, dtype=np.int64) * self._segment_length // windows
        # Loaders may share an order: lru_cache is safe in threads.
        self._shuffled = lru_cache(2 * self.segments + 2)(partial(_shuffled_window, seed))
        self._epoch = lru_cache(2)(partial(_shuffled_shards, seed, samples))

    @property
    def steps(self) -> None:
        """Training has no last step of its own."""
        return None

    def batch(self, step: int, first_slot: int, last_slot: int) -> Slots:
        """Slots [first_slot, last_slot) of the global batch of `step` (updates done before it, from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        pieces = []
        for segment in range(first_slot // self._per_segment, -(-last_slot // self._per_segment)):
            low = max(first_slot - segment * self._per_segment, 0)
            high = min(last_slot - segment * self._per_segment, self._per_segment)
            start = index * self._per_segment
            pieces.append(self._sequence_positions(epoch, segment, start + low, start + high))
        places = np.concatenate(pieces)
        shards, ends = self._epoch(epoch)
        at = np.searchsorted(ends, places, side="right")
        begins = np.where(at > 0, ends[at - 1], 0)
        return Slots(epoch, shards[at], places - begins, np.ones(len(places), bool))

    def _sequence_positions(self, epoch: int, segment: int, start: int, stop: int) -> np.ndarray:
        """Where positions [start, stop) of a shuffled segment lie in the epoch's sequence of samples."""
        pieces = []
        window = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            low, high = int(self._bounds[window]), int(self._bounds[window + 1])
            shuffled = self._shuffled(epoch, segment, window, high - low)
            end = min(stop, high)
            pieces.append(segment * self._segment_length + low + shuffled[start - low : end - low].astype(np.int64))
            start, window = end, window + 1
        return np.concatenate(pieces)


def _shuffled_window(seed: int, epoch: int, segment: int, window: int, size: int) -> np.ndarray:
    return permutation(size, seed, _WINDOW, epoch, segment, window).astype(np.uint32)


def _shuffled_shards(seed: int, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The shards in this epoch's order, and where each of them ends in its sequence."""
    shards = permutation(len(samples), seed, _SHARDS, epoch)
    return shards, np.cumsum(samples[shards])


class EvalOrder:
    """Every sample once, in the order of the manifest; the last batch is filled up, its fillers masked.

    Args:
        shard_samples: selected samples of every shard.
        global_batch: samples of all ranks together at a time.
    """

    def __init__(self, shard_samples: Sequence[int], global_batch: int) -> None:
        self._ends = np.cumsum(np.asarray(shard_samples, np.int64))
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        self.global_batch = global_batch
        self.steps = -(-self.num_samples // global_batch)

    def batch(self, step: int, first_slot: int, last_slot: int) -> Slots:
        """Slots [first_slot, last_slot) of batch `step`. Fillers repeat the first sample."""
        places = step * self.global_batch + np.arange(first_slot, last_slot, dtype=np.int64)
        mask = places < self.num_samples
        places = np.where(mask, places, 0)
        at = np.searchsorted(self._ends, places, side="right")
        begins = np.where(at > 0, self._ends[at - 1], 0)
        return Slots(0, at, places - begins, mask)


def num_segments(num_shards: int, global_batch: int) -> int:
    """S: the largest power of two up to 128 that divides the global batch and leaves two shards a segment; or 1."""
    segments = 1
    while segments * 2 <= MAX_SEGMENTS and global_batch % (segments * 2) == 0 and num_shards // (segments * 2) >= 2:
        segments *= 2
    return segments
