"""The order of training: a shuffle that any world sees alike, and that a step alone determines."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data import ORDER_VERSION, TrainOrder
from vitscale.data.hashing import combine, hashes, mix, permutation
from vitscale.data.order import MAX_SEGMENTS, WINDOW_SAMPLES, num_segments
from vitscale.errors import DataError

shard_lists = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def numbered(shard_samples, slots):
    """Samples as numbers: the shards one after another, whatever the epoch."""
    begins = np.cumsum(shard_samples) - shard_samples
    assert np.all(slots.position < np.asarray(shard_samples)[slots.shard])
    return begins[slots.shard] + slots.position


def whole_epoch(order, shard_samples, epoch):
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return [numbered(shard_samples, order.batch(step, 0, order.global_batch)) for step in steps]


@settings(max_examples=60, deadline=None)
@given(shard_lists, st.sampled_from([1, 2, 3, 8, 12, 16, 48, 64]), st.integers(0, 2**63 - 1), st.data())
def test_an_epoch_shows_every_sample_once_but_for_a_short_tail(shard_samples, batch, seed, data):
    total = sum(shard_samples)
    if total < batch:
        with pytest.raises(DataError):
            TrainOrder(shard_samples, batch, seed)
        return
    order = TrainOrder(shard_samples, batch, seed)
    epoch = data.draw(st.integers(0, 1000))
    seen = np.concatenate(whole_epoch(order, shard_samples, epoch))
    assert len(np.unique(seen)) == len(seen)
    assert 0 <= total - len(seen) < batch + order.segments


@settings(max_examples=40, deadline=None)
@given(shard_lists, st.sampled_from([8, 16, 40, 64]), st.integers(0, 99), st.integers(0, 10**6))
def test_ranks_share_one_batch_and_every_step_is_reached_directly(shard_samples, batch, seed, step):
    shard_samples = [*shard_samples, batch]
    order = TrainOrder(shard_samples, batch, seed)
    whole = order.batch(step, 0, batch)
    assert whole.mask.all() and whole.epoch == step // order.steps_per_epoch
    for world in (1, 2, 4, 8):
        fresh = TrainOrder(shard_samples, batch, seed)  # nothing cached, and not asked in sequence
        parts = [fresh.batch(step, r * batch // world, (r + 1) * batch // world) for r in reversed(range(world))][::-1]
        for name in ("shard", "position", "mask"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def test_windows_may_end_within_a_batch():
    """Segments of several windows, with batches across their bounds."""
    shard_samples = [50_000] * 8 + [1]
    batch = 24_576
    order = TrainOrder(shard_samples, batch, 3)
    assert order.segments == 4 and order._segment_length > WINDOW_SAMPLES  # two windows a segment
    seen = whole_epoch(order, shard_samples, 1)
    everything = np.concatenate(seen)
    assert len(np.unique(everything)) == len(everything) > sum(shard_samples) - batch - order.segments
    step = order.steps_per_epoch + 8  # positions 49,152 .. 55,296 of each segment: over the bound at 50,000
    again = TrainOrder(shard_samples, batch, 3).batch(step, 0, batch)
    assert np.array_equal(numbered(shard_samples, again), seen[8])


def test_epochs_and_seeds_differ_and_leave_out_other_samples():
    shard_samples, batch = [30] * 10 + [17], 64
    order, other = TrainOrder(shard_samples, batch, 0), TrainOrder(shard_samples, batch, 1)
    epochs = [np.concatenate(whole_epoch(order, shard_samples, epoch)) for epoch in range(30)]
    assert len({tuple(epoch) for epoch in epochs}) == 30
    assert not np.array_equal(epochs[0], np.concatenate(whole_epoch(other, shard_samples, 0)))
    left_out = [frozenset(range(sum(shard_samples))) - set(epoch.tolist()) for epoch in epochs]
    assert len(set(left_out)) == 30
    assert len(frozenset.union(*left_out)) > 0.9 * sum(shard_samples)


@pytest.mark.parametrize("shards, batch", [(1, 32), (8, 32), (16, 64)])
def test_the_shuffle_is_uniform(shards, batch):
    """Over many epochs each sample visits each tenth of an epoch equally often (chi-square, seed fixed)."""
    shard_samples = [512 // shards] * shards
    order = TrainOrder(shard_samples, batch, 7)
    epochs, bins = 400, 8
    visits = np.zeros((512, bins))
    place = np.arange(512) * bins // 512
    for epoch in range(epochs):
        visits[np.concatenate(whole_epoch(order, shard_samples, epoch)), place] += 1
    expected = epochs / bins
    chi_square = ((visits - expected) ** 2 / expected).sum(axis=1)  # per sample, bins - 1 = 7 degrees of freedom
    assert abs(chi_square.mean() - 7) < 0.6
    assert chi_square.max() < 35  # 512 draws: P(any > 35) is about 1 %

    # Two epochs have no more in common than two random orders: fixed points, and rank correlation.
    first, second = (np.argsort(np.concatenate(whole_epoch(order, shard_samples, epoch))) for epoch in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2
    assert (first == second).sum() <= 6


def test_classes_mix_within_a_batch_even_of_unshuffled_shards():
    """Each shard one class: the worst input. A batch draws on S segments, each shuffled over several shards."""
    order = TrainOrder([100] * 64, 256, 0)
    assert order.segments == 32
    for step in range(order.steps_per_epoch):
        assert len(np.unique(order.batch(step, 0, 256).shard)) >= 48


def test_157_shards_with_a_short_last_one():
    """ImageNet's shape: 1,281,167 samples in shards of 8,192."""
    shard_samples = [8192] * 156 + [1_281_167 - 156 * 8192]
    order = TrainOrder(shard_samples, 4096, 0)
    assert (order.segments, order.steps_per_epoch, order.num_samples) == (64, 312, 1_281_167)
    seen = np.concatenate(whole_epoch(order, shard_samples, 2))
    assert len(np.unique(seen)) == len(seen) == 312 * 4096


def test_as_many_samples_as_slots():
    for shard_samples in ([64], [1] * 64, [0, 63, 0, 1, 0]):
        order = TrainOrder(shard_samples, 64, 0)
        assert order.steps_per_epoch == 1
        first, second = (numbered(shard_samples, order.batch(step, 0, 64)) for step in (0, 1))
        assert sorted(first) == sorted(second) == list(range(64)) and first.tolist() != second.tolist()


@pytest.mark.parametrize("shard_samples", [[], [0], [100], [50, 49, 28]])
def test_fewer_samples_than_a_batch_is_an_error_with_both_numbers(shard_samples):
    with pytest.raises(DataError, match=rf"{sum(shard_samples)} samples.*global batch of 128"):
        TrainOrder(shard_samples, 128, 0)


def test_number_of_segments():
    assert [num_segments(shards, 4096) for shards in (1, 3, 4, 7, 8, 157, 36_000)] == [1, 1, 2, 2, 4, 64, MAX_SEGMENTS]
    assert [num_segments(1000, batch) for batch in (1, 3, 12, 96, 100)] == [1, 1, 4, 32, 4]


def test_three_hundred_million_samples_need_little_memory():
    tracemalloc.start()
    order = TrainOrder([8192] * 36_621, 4096, 0)
    slots = order.batch(500_000, 0, 4096)
    assert len(slots.shard) == 4096 and slots.epoch == 6
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 << 20  # one rank of one: a window of each of 128 segments


def test_an_order_shared_by_threads():
    """A loader that is being closed may overlap with its successor."""
    from concurrent.futures import ThreadPoolExecutor

    shard_samples = [40] * 8
    order, alone = TrainOrder(shard_samples, 8, 0), TrainOrder(shard_samples, 8, 0)
    steps = np.random.default_rng(0).integers(0, 4000, 2000).tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: numbered(shard_samples, order.batch(step, 0, 8)), steps))
    for step, numbers in zip(steps[::20], found[::20], strict=True):
        assert np.array_equal(numbers, numbered(shard_samples, alone.batch(step, 0, 8)))


def test_order_version_1_is_frozen():
    """A checkpoint resumes into the same order. If this must change, so must ORDER_VERSION."""
    assert ORDER_VERSION == 1
    order = TrainOrder([5, 3, 7, 4], 8, 11)
    frozen = {
        0: (0, [0, 3, 0, 3, 2, 1, 2, 1], [1, 0, 4, 3, 4, 2, 3, 1]),
        1: (0, [3, 0, 0, 0, 2, 2, 1, 2], [1, 0, 3, 2, 2, 1, 0, 5]),
        2: (1, [3, 0, 0, 0, 1, 2, 1, 2], [3, 0, 4, 2, 1, 1, 2, 4]),
        7: (3, [3, 0, 3, 0, 1, 2, 2, 2], [0, 0, 3, 2, 0, 5, 0, 1]),
    }
    for step, (epoch, shard, position) in frozen.items():
        slots = order.batch(step, 0, 8)
        assert (slots.epoch, slots.shard.tolist(), slots.position.tolist()) == (epoch, shard, position)
    large = TrainOrder([100_000, 50_000, 7], 64, 5)
    assert large.batch(large.steps_per_epoch * 3 + 1024, 60, 64).position.tolist() == [33701, 4212, 4050, 26501]
    slots = TrainOrder([8192] * 36_621, 4096, 1).batch(500_000, 2046, 2050)
    assert slots.shard.tolist() == [27224, 22438, 34387, 18532]
    assert slots.position.tolist() == [1252, 2632, 1839, 4220]


def test_hashes_are_frozen():
    assert permutation(12, 0, 1, 0).tolist() == [11, 3, 4, 2, 6, 0, 7, 8, 10, 1, 9, 5]
    assert int(combine(1, 2, 3)) == 0xD0734750FDE362B3
    assert hashes(2, 7, 8).tolist() == [0xCC744362ECDCB542, 0xBB3DF7BC01B40909]
    assert int(mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # SplitMix64's published first output for seed 0
    assert len({int(combine(*parts)) for parts in [(1, 2), (2, 1), (1,), (1, 0), (0, 1), (0,)]}) == 6


@given(st.integers(0, 500), st.integers(0, 2**64 - 1), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_permutation_is_one(count, seed, part):
    found = permutation(count, seed, part)
    assert found.dtype == np.int64 and sorted(found.tolist()) == list(range(count))
