"""The shuffle is one: it does what chance would do, within what chance allows.

Every test states as a probability how rarely a shuffle drawn at random would look as bad, and refuses below ALARM
divided by the number of probabilities that it looks at: with fresh seeds one test in a million would raise a false
alarm, with the fixed seeds none does. What hashes draw is frozen in test_train_order.py.
"""

import math
from functools import cache

import numpy as np
import pytest
from orders import epoch_of
from scipy import stats

from vitscale.data import order as order_module
from vitscale.data.order import TrainOrder

ALARM = 1e-6
SEEDS = [0, 1, 2, 3, 1000, 1001, 2**32, 2**63 - 2, 2**63 - 1]
EPOCHS = 25

# Shards and global batch.
SHAPES = {
    "one shard": ([600], 32),  # one segment, 24 samples are left out of an epoch
    "157 shards with a short last one": ([8] * 156 + [3], 96),  # 32 segments, 3 left out
    # 2 segments, 18 left out
    "empty shards, a batch that is no power of two": ([0, 40, 0, 0, 17, 33, 64, 0, 5, 51], 24),
    "an odd batch": ([50] * 8, 25),  # one segment, nothing left out
    "two batches an epoch": ([16] * 16 + [1], 128),  # 8 segments, one left out
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def both_tails(tail):
    """Of a chi-square: too uneven, or more even than chance would be."""
    return 2 * min(tail, 1 - tail)


class Times:
    """In which step every sample is seen, for all seeds and epochs.

    Attributes:
        batch, steps: samples a batch, batches an epoch.
        at: int64 (seeds, epochs, samples), the step in its epoch; -1 where a sample is left out.
    """

    def __init__(self, samples, batch, epochs_of):
        self.batch, self.steps = batch, samples // batch
        self.at = np.full((len(SEEDS), EPOCHS, samples), -1)
        for number, seed in enumerate(SEEDS):
            for epoch, seen in zip(range(EPOCHS), epochs_of(seed), strict=False):
                self.at[number, epoch, seen] = np.arange(self.steps)[:, None]

    def pairs(self, axis):
        """The steps of all samples in two successive epochs (axis 1), or with two successive seeds (axis 0)."""
        along = np.moveaxis(self.at, axis, 0)
        for one, other in zip(
            along[:-1].reshape(-1, along.shape[-1]), along[1:].reshape(-1, along.shape[-1]), strict=True
        ):
            seen = (one >= 0) & (other >= 0)
            yield one[seen], other[seen]


@cache
def times(shape):
    shard_samples, batch = SHAPES[shape]

    def epochs_of(seed):
        order = TrainOrder(shard_samples, batch, seed)
        return (epoch_of(order, shard_samples, epoch) for epoch in range(EPOCHS))

    return Times(sum(shard_samples), batch, epochs_of)


def uniformity(times, sample):
    """A sample that is seen is seen in each step as often."""
    at = times.at[:, :, sample]
    return both_tails(stats.chisquare(np.bincount(at[at >= 0], minlength=times.steps)).pvalue)


def independence(times, axis):
    """Step and step of a sample are uncorrelated.

    The correlation of two random orders of n samples has a mean of 0 and a variance of 1 / (n - 1); of at most
    1 / (n - S) where each of S segments has its share of every step. Here S is at most 32.
    """
    scores = [np.corrcoef(one, other)[0, 1] * math.sqrt(len(one) - 32) for one, other in times.pairs(axis)]
    together = stats.norm.sf(abs(sum(scores)) / math.sqrt(len(scores)))
    return min(1.0, 2 * stats.chi2.sf(float(np.square(scores).sum()), len(scores)), 4 * together)


def company(times, axis):
    """Samples that met in a batch meet again no more often than any two.

    Of n samples in batches of a_i, then in batches of b_j, sum C(a_i, 2) sum C(b_j, 2) / C(n, 2) pairs stay together,
    a number that varies like a Poisson one or less.
    """
    met, expected = 0, 0.0
    for one, other in times.pairs(axis):
        counts = np.bincount(one * times.steps + other, minlength=times.steps**2).reshape(times.steps, times.steps)
        before, after, again = (int((n * (n - 1) // 2).sum()) for n in (counts.sum(1), counts.sum(0), counts))
        met, expected = met + again, expected + before * after / (len(one) * (len(one) - 1) / 2)
    return stats.norm.sf((met - expected) / math.sqrt(expected))


def neighbours(times, apart):
    """Samples stored at a distance of `apart` meet in a batch no more often than any two (less, within a segment)."""
    near, far = times.at[:, :, :-apart], times.at[:, :, apart:]
    samples = times.at.shape[-1]
    met = int(((near == far) & (near >= 0)).sum())
    expected = near.size * (times.steps * times.batch / samples) * (times.batch - 1) / (samples - 1)
    return stats.norm.sf((met - expected) / math.sqrt(expected))


@every_shape
def test_a_sample_is_seen_at_any_time_of_an_epoch(shape):
    """First and last of all, and of a shard, and those between."""
    total = sum(SHAPES[shape][0])
    asked = sorted({0, 1, 7, 8, total // 3, total // 2, total - 4, total - 2, total - 1})
    assert min(uniformity(times(shape), sample) for sample in asked) > ALARM / len(asked)


@every_shape
@pytest.mark.parametrize("axis", [0, 1], ids=["seeds", "epochs"])
def test_successive_epochs_and_seeds_have_nothing_in_common(shape, axis):
    assert independence(times(shape), axis) > ALARM
    assert company(times(shape), axis) > ALARM


@every_shape
def test_neighbours_in_storage_do_not_stay_together(shape):
    assert min(neighbours(times(shape), apart) for apart in (1, 2, 8, 100)) > ALARM / 4


@every_shape
def test_only_the_remainder_is_left_out_and_others_each_time(shape):
    """A sample is left out by its place in its segment (all alike), or with the end of the epoch's last shard."""
    shard_samples, batch = SHAPES[shape]
    at, total = times(shape).at, sum(shard_samples)
    left_out = at < 0
    if total % batch == 0:
        return
    segments = TrainOrder(shard_samples, batch, 0).segments
    shards = sum(size > 0 for size in shard_samples) if segments > 1 else math.inf
    again = int(np.all(left_out[:, 1:] == left_out[:, :-1], axis=2).sum())
    trials = len(SEEDS) * EPOCHS
    assert stats.binom.sf(again - 1, trials, 1 / shards + 1e-9) > ALARM
    chance = (total % batch) // segments / (total // segments) + 1 / shards
    assert stats.binom.sf(left_out.sum((0, 1)).max() - 1, trials, chance) > ALARM / total


def test_left_out_samples_of_one_segment_are_any():
    """Each sample is left out as often: chi-square, corrected for drawing them without replacement."""
    left_out = (times("one shard").at < 0).sum((0, 1))
    share = 24 / 600
    expected = share * len(SEEDS) * EPOCHS
    value = float(((left_out - expected) ** 2).sum()) / (expected * (1 - share)) * 599 / 600
    assert both_tails(stats.chi2.sf(value, 599)) > ALARM


def test_segments_and_windows_are_shuffled_apart(monkeypatch):
    """Each window one shard, 32 segments of two: the orders of their samples have nothing in common."""
    monkeypatch.setattr(order_module, "WINDOW_SAMPLES", 64)
    order = TrainOrder([64] * 64, 64, 0)
    assert (order.segments, order.steps_per_epoch, len(order._bounds) - 1) == (32, 64, 2)
    for epoch in range(8):
        steps = range(epoch * 64, epoch * 64 + 64)
        positions = np.stack([order.batch(step, 0, 64).position for step in steps])  # of 32 segments, two slots each
        shuffled = positions.reshape(2, 32, 32, 2).transpose(0, 2, 1, 3).reshape(64, 64)  # windows, samples
        assert np.array_equal(np.sort(shuffled, axis=1), np.tile(np.arange(64), (64, 1)))
        # Of independent orders all pairs are uncorrelated: nearly a chi-square of as many degrees.
        scores = np.corrcoef(shuffled)[np.triu_indices(64, 1)] * math.sqrt(63)
        assert stats.chi2.sf(float(np.square(scores).sum()), len(scores)) > ALARM / 8
