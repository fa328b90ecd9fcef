"""The order of training: which sample is in which slot, a function of (shards, global batch, seed, step), never stored.

In each epoch the shards are permuted and concatenated. The sequence is cut into S equal contiguous segments, each
shuffled within windows, and each segment fills G / S slots of every global batch of G samples. Going to any step costs
only the shuffles of the windows it lies in, and the order's whole state is the step.

If R ranks divide S, each rank's slots are whole segments and it reads shards of its own: over an epoch the ranks
together open at most R - 1 shards twice, those that a border between two ranks cuts. If R does not divide S, a segment
shared by two or more ranks is read by each of them, every one drawing on all of its shards; all ranks still see the
same order.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from vitscale.data.draws import Purpose, permutation, places_in_permutation
from vitscale.ground.errors import RecipeError

# Since 2 fewer than four shards are shuffled as a whole; 1 had windows of 65,536 samples there as well.
ORDER_VERSION = 2
MAX_SEGMENTS = 128
WINDOW_SAMPLES = 65_536

# Converted shards are already shuffled, but a file that was made elsewhere may be sorted by class. Such a dataset has
# too few shards to be mixed by segments and by permuting shards, so the window alone must do it. For ImageNet-21k (14
# million images) the shuffle of an epoch takes 4 s and, meanwhile, 0.45 GB. Larger datasets are cut into windows again,
# of at most WHOLE_SAMPLES.
_FEW_SHARDS = 4
WHOLE_SAMPLES = 1 << 24


class Slots(NamedTuple):
    """The samples in consecutive slots of one global batch."""

    epoch: int  # from 0
    shard: np.ndarray  # index of each sample's shard, int64 (slots,)
    position: np.ndarray  # each sample's place among the selected samples of its shard, int64 (slots,)
    mask: np.ndarray  # bool (slots,), False where the slot is a filler
    view: np.ndarray  # which view of its sample each slot is, from 0, int64 (slots,)


class TrainOrder:
    """The order of training: epoch after epoch, without end.

    An epoch of N samples has floor(N / G) batches. The N mod G samples that it leaves out differ from epoch to epoch:
    the last ones of each shuffled segment, and the last N mod S of the epoch's sequence.

    With n `repeats` a batch holds G / n samples, rounded up, n times each: it consists of n parts with the same samples
    in the same order, and the last part ends early if n does not divide G. An epoch of the order, in which each sample
    is drawn once, then has n times as many batches.

    Args:
        shard_samples: the number of selected samples of each shard.
        global_batch: G, the number of slots of a step.
        seed: the seed of the shuffle.
        repeats: n, the number of views of each sample in a batch.

    Raises RecipeError if there are fewer samples than one global batch.
    """

    def __init__(self, shard_samples: Sequence[int], global_batch: int, seed: int, repeats: int = 1) -> None:
        samples = np.asarray(shard_samples, np.int64)
        self.num_samples = int(samples.sum())
        self.global_batch, self._seed = global_batch, seed
        if self.num_samples < global_batch:
            raise RecipeError(
                f"the dataset has {self.num_samples} samples, fewer than one global batch of {global_batch}; "
                f"use a smaller batch.global"
            )
        self.steps = None  # it has no last step
        self._distinct = -(-global_batch // repeats)
        self.segments = num_segments(len(shard_samples), self._distinct)
        self._per_segment = self._distinct // self.segments
        self._segment_length = self.num_samples // self.segments
        self.steps_per_epoch = self._segment_length // self._per_segment
        windows = -(-self._segment_length // (WHOLE_SAMPLES if len(samples) < _FEW_SHARDS else WINDOW_SAMPLES))
        self._bounds = np.arange(windows + 1, dtype=np.int64) * self._segment_length // windows
        # For each segment the window in use and the next one. Loaders may share an order: lru_cache is thread-safe.
        self._shuffled = [lru_cache(2)(partial(_shuffled_window, seed, segment)) for segment in range(self.segments)]
        self._epoch = lru_cache(2)(partial(_shuffled_shards, seed, samples))

    def epochs(self, step: int) -> float:
        """How often the batches before `step` have shown each sample on average; every view counts as one."""
        return step * self.global_batch / (self._distinct * self.steps_per_epoch)

    def batch(self, step: int, first_slot: int, last_slot: int) -> Slots:
        """Slots [first_slot, last_slot) of the global batch of `step` (updates done before it, from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        pieces = []
        for first, last in self._parts(first_slot, last_slot):
            for segment in range(first // self._per_segment, -(-last // self._per_segment)):
                low = max(first - segment * self._per_segment, 0)
                high = min(last - segment * self._per_segment, self._per_segment)
                start = index * self._per_segment
                pieces.append(self._sequence_positions(epoch, segment, start + low, start + high))
        places = np.concatenate(pieces)
        shards, ends = self._epoch(epoch)
        at, position = _locate(ends, places)
        view = np.arange(first_slot, last_slot, dtype=np.int64) // self._distinct
        return Slots(epoch, shards[at], position, np.ones(len(places), bool), view)

    def _parts(self, first_slot: int, last_slot: int) -> list[tuple[int, int]]:
        """The slots as ranges within the batch's G / n distinct samples, one range for each view."""
        views = range(first_slot // self._distinct, -(-last_slot // self._distinct))
        return [
            (max(first_slot - view * self._distinct, 0), min(last_slot - view * self._distinct, self._distinct))
            for view in views
        ]

    def find(self, shard: np.ndarray, position: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `batch`: each sample's step and first slot in an epoch, int64 (n,); -1 if it is left out.

        `shard` and `position` are as in `Slots`, int64 (n,). Costs the hashes of the windows that the samples lie in,
        whatever the size of the dataset.
        """
        shards, ends = self._epoch(epoch)
        at = np.argsort(shards)[shard]
        places = position + np.where(at > 0, ends[at - 1], 0)
        segments, inside = np.divmod(places, self._segment_length)
        windows = np.searchsorted(self._bounds, inside, side="right") - 1
        steps, slots = np.full((2, len(places)), -1, np.int64)
        whole = segments < self.segments  # the last N mod S samples of the sequence are in no segment
        for segment, window in sorted({*zip(segments[whole].tolist(), windows[whole].tolist(), strict=True)}):
            rows = np.flatnonzero((segments == segment) & (windows == window))
            low, high = int(self._bounds[window]), int(self._bounds[window + 1])
            key = _window_key(self._seed, segment, epoch, window)
            index, slot = np.divmod(
                low + places_in_permutation(inside[rows] - low, high - low, *key), self._per_segment
            )
            drawn = index < self.steps_per_epoch
            steps[rows[drawn]] = epoch * self.steps_per_epoch + index[drawn]
            slots[rows[drawn]] = segment * self._per_segment + slot[drawn]
        return steps, slots

    def views(self, first_slot: int) -> range:
        """All slots of the sample whose first view is in `first_slot` of a batch, one for each view."""
        return range(first_slot, self.global_batch, self._distinct)

    def next_epoch(self, step: int) -> int:
        """The first step, from `step` on, that begins an epoch."""
        return -(-step // self.steps_per_epoch) * self.steps_per_epoch

    def upcoming(self, step: int, first_slot: int, last_slot: int) -> list[int]:
        """Shards that slots [first_slot, last_slot) draw on from `step` on, each once, in the order of need.

        First those of the windows that the batch of `step` lies in, then those of each segment's next window, which may
        be in the next epoch. No window is shuffled for this: the shards it spans are known beforehand.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self._per_segment
        parts = self._parts(first_slot, last_slot)
        first_slot, last_slot = parts[0] if len(parts) == 1 else (0, self._distinct)
        current = range(self._window_at(start), self._window_at(start + self._per_segment - 1) + 1)
        epoch_ends = self._bounds[current.stop] >= self.steps_per_epoch * self._per_segment
        following = (epoch + 1, 0) if epoch_ends else (epoch, current.stop)
        segments = np.arange(first_slot // self._per_segment, -(-last_slot // self._per_segment), dtype=np.int64)
        needed: dict[int, None] = {}
        for number, window in [*((epoch, window) for window in current), following]:
            shards, ends = self._epoch(number)
            low, high = segments * self._segment_length + self._bounds[window : window + 2, None]
            needed.update(dict.fromkeys(shards[_overlapping(ends, low, high)].tolist()))
        return list(needed)

    def _window_at(self, position: int) -> int:
        return int(np.searchsorted(self._bounds, position, side="right")) - 1

    def _sequence_positions(self, epoch: int, segment: int, start: int, stop: int) -> np.ndarray:
        """The places of positions [start, stop) of a shuffled segment in the epoch's sequence of samples, int64."""
        pieces = []
        window = self._window_at(start)
        while start < stop:
            low, high = int(self._bounds[window]), int(self._bounds[window + 1])
            shuffled = self._shuffled[segment](epoch, window, high - low)
            end = min(stop, high)
            pieces.append(segment * self._segment_length + low + shuffled[start - low : end - low].astype(np.int64))
            start, window = end, window + 1
        return np.concatenate(pieces)


def _shuffled_window(seed: int, segment: int, epoch: int, window: int, size: int) -> np.ndarray:
    return permutation(size, *_window_key(seed, segment, epoch, window)).astype(np.uint32)


def _window_key(seed: int, segment: int, epoch: int, window: int) -> tuple[int, ...]:
    return seed, Purpose.WINDOW, epoch, segment, window


def _shuffled_shards(seed: int, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The shards in this epoch's order, and the end of each in the epoch's sequence of samples."""
    shards = permutation(len(samples), seed, Purpose.SHARDS, epoch)
    return shards, np.cumsum(samples[shards])


class EvalOrder:
    """Evaluation's order: every sample once, in the manifest's order; fillers complete the last batch and are masked.

    Its arguments are as those of `TrainOrder`.

    Args:
        rows: the only samples to take, int64 (N,), sorted, as numbers in the manifest's order; None takes all.
    """

    def __init__(self, shard_samples: Sequence[int], global_batch: int, rows: np.ndarray | None = None) -> None:
        self._ends = np.cumsum(np.asarray(shard_samples, np.int64))
        self._positions: np.ndarray | None = None
        if rows is not None:  # each shard has as many samples as are taken of it, at these positions
            of_shard, self._positions = _locate(self._ends, rows)
            self._ends = np.cumsum(np.bincount(of_shard, minlength=len(self._ends)))
        self.num_samples = int(self._ends[-1]) if len(self._ends) else 0
        self.global_batch = global_batch
        self.steps = -(-self.num_samples // global_batch)

    def batch(self, step: int, first_slot: int, last_slot: int) -> Slots:
        """Slots [first_slot, last_slot) of batch `step`. Fillers repeat the first sample."""
        places = step * self.global_batch + np.arange(first_slot, last_slot, dtype=np.int64)
        mask = places < self.num_samples
        places = np.where(mask, places, 0)
        at, position = _locate(self._ends, places)
        position = position if self._positions is None else self._positions[places]
        return Slots(0, at, position, mask, np.zeros(len(places), np.int64))

    def upcoming(self, step: int, first_slot: int, last_slot: int) -> list[int]:
        """Shards that slots [first_slot, last_slot) read from `step` on, each once, in the order of need.

        Looks ahead for as many batches as give these slots 65,536 samples, at least one batch.
        """
        batches = max(WINDOW_SAMPLES // (last_slot - first_slot), 1)
        starts = np.arange(step, min(step + batches, self.steps), dtype=np.int64) * self.global_batch + first_slot
        stops = starts + (last_slot - first_slot)
        real = starts < self.num_samples
        shards = _overlapping(self._ends, starts[real], np.minimum(stops[real], self.num_samples)).tolist()
        if np.any(stops > self.num_samples):  # fillers
            shards += _overlapping(self._ends, np.zeros(1, np.int64), np.ones(1, np.int64)).tolist()
        return list(dict.fromkeys(shards))


def _locate(ends: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which shard of a sequence each place lies in, and its position there; `ends` are the shards' ends."""
    at = np.searchsorted(ends, places, side="right")
    return at, places - np.where(at > 0, ends[at - 1], 0)


def _overlapping(ends: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Which shards, with these `ends`, have samples in any of the ranges [starts, stops), none of them empty."""
    changes = np.zeros(len(ends) + 1, np.int64)
    np.add.at(changes, np.searchsorted(ends, starts, side="right"), 1)
    np.add.at(changes, np.searchsorted(ends, stops - 1, side="right") + 1, -1)
    return np.flatnonzero((np.cumsum(changes[:-1]) > 0) & (np.diff(ends, prepend=0) > 0))


def num_segments(num_shards: int, global_batch: int) -> int:
    """S: the largest power of two up to 128 that divides the global batch and leaves two shards a segment, else 1."""
    segments = 1
    while segments * 2 <= MAX_SEGMENTS and global_batch % (segments * 2) == 0 and num_shards // (segments * 2) >= 2:
        segments *= 2
    return segments
