"""Orders: what is frozen, their limits, which shards they read when, and what that costs."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from orders import epoch_of, numbered

from vitscale.data.draws import combine, hashes, mix, permutation
from vitscale.data.order import MAX_SEGMENTS, ORDER_VERSION, WHOLE_SAMPLES, EvalOrder, TrainOrder, num_segments

IMAGENET = [8192] * 156 + [1_281_167 - 156 * 8192]
TWO_WINDOWS = [50_000] * 8 + [1]  # four segments of two windows each
ODD_BATCH = [8192] * 40 + [17]  # an odd batch makes one segment of many windows


def test_number_of_segments():
    assert [num_segments(shards, 4096) for shards in (1, 3, 4, 7, 8, 157, 36_000)] == [1, 1, 2, 2, 4, 64, MAX_SEGMENTS]
    assert [num_segments(1000, batch) for batch in (1, 3, 12, 96, 100)] == [1, 1, 4, 32, 4]


@pytest.mark.parametrize("shard_samples", [[150_000], [10_000, 139_000, 1_000]])
def test_fewer_than_four_shards_are_one_window(shard_samples):
    order = TrainOrder(shard_samples, 5000, 0)
    for epoch in range(2):
        for seen in epoch_of(order, shard_samples, epoch):  # 5,000 draws out of 150,000: the chance of a miss is e^-500
            assert seen.min() < 15_000 and seen.max() > 135_000


def test_a_shard_of_hundreds_of_millions_is_cut_into_windows():
    order = TrainOrder([300_000_000], 4096, 0)
    windows = np.diff(order._bounds)
    assert len(windows) == 18 and windows.max() <= WHOLE_SAMPLES and windows.sum() == 300_000_000


@pytest.mark.parametrize(
    ("shard_samples", "batch", "segments", "worlds", "shards_of_a_border"),
    [
        (IMAGENET, 4096, 64, [1, 2, 4, 8, 16, 32, 64], 1),
        # Ranks that do not divide the segments: 20,018 samples lie in at most four shards of 8,192.
        (IMAGENET, 3072, 64, [3, 6, 12], 4),
        ([40] * 9, 32, 4, [1, 2, 4], 1),
    ],
)
def test_ranks_read_shards_of_their_own(shard_samples, batch, segments, worlds, shards_of_a_border):
    """The dataset crosses the network once an epoch, but for the shards at each border between two ranks."""
    order = TrainOrder(shard_samples, batch, 0)
    assert order.segments == segments
    steps = range(order.steps_per_epoch, 2 * order.steps_per_epoch)
    drawn = np.stack([order.batch(step, 0, batch).shard for step in steps])
    for world in worlds:
        ranks = [set(np.unique(part).tolist()) for part in np.split(drawn, world, axis=1)]
        assert set().union(*ranks) == set(range(len(shard_samples)))
        assert sum(map(len, ranks)) <= len(shard_samples) + (world - 1) * shards_of_a_border


def test_upcoming_shards_come_in_the_order_of_windows():
    """Four segments of two windows of five shards each; the windows change within the batch of step 19."""
    batch = 10_004
    order = TrainOrder([10_000] * 40, batch, 0)
    assert (order.segments, order.steps_per_epoch) == (4, 39)
    drawn = [set(order.batch(step, 0, batch).shard.tolist()) for step in range(59)]
    first, second, third = (set().union(*drawn[steps]) for steps in (slice(19), slice(20, 39), slice(39, 58)))
    assert len(first) == len(second) == len(third) == 20 and not first & second

    def ahead(step, *counts):
        upcoming = order.upcoming(step, 0, batch)
        return [set(upcoming[slice(*count)]) for count in counts]

    for step in (0, 7, 18):
        assert ahead(step, (20,), (20, None)) == [first, second]
    assert ahead(19, (20,), (20, 40), (None,)) == [first, second, first | second | third]
    for step in (20, 38):
        assert ahead(step, (20,), (None,)) == [second, second | third]  # the next epoch's first window
    assert ahead(39, (20,)) == [third]


def test_three_hundred_million_samples_need_little_memory():
    tracemalloc.start()
    order = TrainOrder([8192] * 36_621, 4096, 0)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    upcoming = order.upcoming(500_000, 0, 4096)
    assert tracemalloc.get_traced_memory()[1] - before < 5 << 20  # no window is shuffled: those in use have 30 MB
    # 58,600 samples a window lie in 8 or 9 shards, those of two windows in 15 to 17
    assert 128 * 15 <= len(upcoming) <= 128 * 17
    mine = order.upcoming(500_000, 0, 512)
    assert len(mine) <= 16 * 17 and set(mine) <= set(upcoming)
    slots = order.batch(500_000, 0, 4096)
    assert len(slots.shard) == 4096 and slots.epoch == 6
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 << 20  # one rank of one: a window of each of 128 segments


def test_a_rank_keeps_two_windows_of_each_of_its_segments():
    order = TrainOrder([8192] * 36_621, 4096, 0)
    order.batch(0, 0, 64)
    tracemalloc.start()
    for step in range(0, 4 * order.steps_per_epoch, 1500):  # nearly every window of four epochs
        order.batch(step, 0, 64)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3 << 20  # two segments, two windows of 0.23 MB each, and two epochs' shards


def test_an_order_shared_by_threads():
    """A loader that is being closed may overlap with its successor."""
    shard_samples = [40] * 8
    order, alone = TrainOrder(shard_samples, 8, 0), TrainOrder(shard_samples, 8, 0)
    steps = np.random.default_rng(0).integers(0, 4000, 2000).tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: numbered(shard_samples, order.batch(step, 0, 8)), steps))
    for step, numbers in zip(steps[::20], found[::20], strict=True):
        assert np.array_equal(numbers, numbered(shard_samples, alone.batch(step, 0, 8)))


# Shards, batch, seed, step, first slot: epoch, shards, positions. The first three are version 1's as well.
SMALL = ([5, 3, 7, 4], 8, 11)
FROZEN = {
    "imagenet": (IMAGENET, 4096, 3, 1871, 2046, 5, [64, 47, 50, 36], [7102, 5314, 5162, 3579]),
    "windows": (ODD_BATCH, 25, 9, 32_767, 0, 2, [28, 19, 19, 28, 31, 38], [791, 4168, 2072, 5919, 4543, 905]),
    "segments": (TWO_WINDOWS, 24_576, 3, 24, 576, 1, [2] * 6, [5227, 15772, 25752, 47336, 3901, 31741]),
    "small 0": (*SMALL, 0, 0, 0, [0, 3, 0, 3, 2, 1, 2, 1], [1, 0, 4, 3, 4, 2, 3, 1]),
    "small 1": (*SMALL, 1, 0, 0, [3, 0, 0, 0, 2, 2, 1, 2], [1, 0, 3, 2, 2, 1, 0, 5]),
    "small 2": (*SMALL, 2, 0, 1, [3, 0, 0, 0, 1, 2, 1, 2], [3, 0, 4, 2, 1, 1, 2, 4]),
    "small 7": (*SMALL, 7, 0, 3, [3, 0, 3, 0, 1, 2, 2, 2], [0, 0, 3, 2, 0, 5, 0, 1]),
    "large": ([8192] * 36_621, 4096, 1, 500_000, 2046, 6, [27224, 22438, 34387, 18532], [1252, 2632, 1839, 4220]),
    "three shards": ([100_000, 50_000, 7], 64, 5, 8053, 60, 3, [0, 0, 0, 0], [55814, 9498, 33655, 64141]),
    "one shard": ([1_281_167], 4096, 5, 1036, 60, 3, [0, 0, 0, 0], [483699, 86468, 21311, 1078511]),
}


@pytest.mark.parametrize("shape", FROZEN)
def test_order_version_2_is_frozen(shape):
    """A checkpoint resumes into the same order. If this must change, so must ORDER_VERSION."""
    assert ORDER_VERSION == 2
    shard_samples, batch, seed, step, first, epoch, shard, position = FROZEN[shape]
    slots = TrainOrder(shard_samples, batch, seed).batch(step, first, first + len(shard))
    assert (slots.epoch, slots.shard.tolist(), slots.position.tolist()) == (epoch, shard, position)


def test_hashes_are_frozen():
    assert permutation(12, 0, 1, 0).tolist() == [11, 3, 4, 2, 6, 0, 7, 8, 10, 1, 9, 5]
    assert int(combine(1, 2, 3)) == 0xD0734750FDE362B3
    assert hashes(2, 7, 8).tolist() == [0xCC744362ECDCB542, 0xBB3DF7BC01B40909]
    assert int(mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # SplitMix64's published first output for seed 0
    assert len({int(combine(*parts)) for parts in [(1, 2), (2, 1), (1,), (1, 0), (0, 1), (0,)]}) == 6


def test_fillers_of_a_rank_repeat_the_first_sample_and_need_its_shard():
    order = EvalOrder([0, 4, 5], 6)
    last = order.batch(1, 3, 6)
    assert (last.shard.tolist(), last.position.tolist(), last.mask.tolist()) == ([1] * 3, [0] * 3, [False] * 3)
    assert order.upcoming(1, 3, 6) == [1]
