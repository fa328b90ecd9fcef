"""What holds for orders of any shards, batch, ranks and step. Windows are small, to change within small epochs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import epoch_of

from vitscale.data import order as order_module
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.ground.errors import RecipeError

quick = settings(max_examples=80, deadline=None, derandomize=True)

shard_lists = st.lists(st.integers(0, 60), max_size=40)
batches = st.sampled_from([1, 2, 3, 8, 12, 16, 25, 48, 64, 96])
seeds = st.integers(0, 2**63 - 1) | st.sampled_from([0, 1, 2**63 - 1])
windows = st.sampled_from([1, 7, 20, 65_536])
repeated = st.just(1) | st.integers(1, 4)
epochs = st.integers(0, 3) | st.integers(0, 10**9)


def train_order(shard_samples, batch, seed, window, repeats=1):
    """An order whose windows have at most `window` samples, one shard's too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "WINDOW_SAMPLES", window)
        patch.setattr(order_module, "WHOLE_SAMPLES", window)
        return TrainOrder(shard_samples, batch, seed, repeats)


def worlds(batch):
    """Numbers of ranks that divide a batch."""
    return st.sampled_from([world for world in range(1, batch + 1) if batch % world == 0])


def batch_of_ranks(order, step, world):
    """The slots that `world` ranks see of one step, joined: shards, positions, mask, views."""
    share = order.global_batch // world
    parts = [order.batch(step, rank * share, (rank + 1) * share) for rank in reversed(range(world))][::-1]
    assert len({part.epoch for part in parts}) == 1
    return [np.concatenate([getattr(part, name) for part in parts]) for name in ("shard", "position", "mask", "view")]


@quick
@given(shard_lists, batches, seeds, windows, epochs)
def test_an_epoch_has_every_sample_once_but_for_the_remainder(shard_samples, batch, seed, window, epoch):
    total = sum(shard_samples)
    if total < batch:
        with pytest.raises(RecipeError, match=f"{total} samples"):
            TrainOrder(shard_samples, batch, seed)
        return
    order = train_order(shard_samples, batch, seed, window)
    seen = epoch_of(order, shard_samples, epoch)
    assert seen.shape == (order.steps_per_epoch, batch) == (total // batch, batch)
    assert len(np.unique(seen)) == seen.size == total - total % batch
    assert order.batch(epoch * order.steps_per_epoch, 0, batch).epoch == epoch


@quick
@given(shard_lists, batches, repeated, seeds, windows, st.integers(0, 200) | st.integers(0, 10**9), st.data())
def test_ranks_share_one_batch_also_when_others_resume(shard_samples, batch, repeats, seed, window, resumed, data):
    shard_samples = [*shard_samples, batch]
    before, after = data.draw(worlds(batch)), data.draw(worlds(batch))
    uninterrupted = train_order(shard_samples, batch, seed, window, repeats)
    for step in range(max(0, resumed - 5), resumed):
        batch_of_ranks(uninterrupted, step, before)
    fresh = train_order(shard_samples, batch, seed, window, repeats)  # nothing cached, and not asked in sequence
    for step in range(resumed, resumed + 5):
        whole = uninterrupted.batch(step, 0, batch)
        assert whole.mask.all() and whole.epoch == step // fresh.steps_per_epoch
        for order, world in ((fresh, after), (uninterrupted, before)):
            for joined, alone in zip(batch_of_ranks(order, step, world), whole[1:], strict=True):
                assert np.array_equal(joined, alone)


@quick
@given(shard_lists, batches, repeated, seeds, windows, st.integers(0, 500) | st.integers(0, 10**9), st.data())
def test_no_shard_is_needed_that_was_not_announced(shard_samples, batch, repeats, seed, window, step, data):
    shard_samples = [*shard_samples, batch]
    order = train_order(shard_samples, batch, seed, window, repeats)
    share = batch // data.draw(worlds(batch))
    first = data.draw(st.integers(0, batch // share - 1)) * share
    slots = first, first + share
    ahead = order.upcoming(step, *slots)
    assert len(set(ahead)) == len(ahead) and all(shard_samples[shard] > 0 for shard in ahead)
    assert set(order.batch(step, *slots).shard.tolist()) <= set(ahead)
    if np.diff(order._bounds).min() >= batch // order.segments:  # a batch lies in two windows at most
        assert set(order.batch(step + 1, *slots).shard.tolist()) <= set(ahead)


@quick
@given(shard_lists, batches, repeated, seeds, windows, st.integers(0, 10**9))
def test_a_repeated_batch_is_the_smaller_one_several_times(shard_samples, batch, repeats, seed, window, step):
    samples = -(-batch // repeats)
    shard_samples = [*shard_samples, batch]
    order = train_order(shard_samples, batch, seed, window, repeats)
    plain = train_order(shard_samples, samples, seed, window)
    assert order.steps_per_epoch == plain.steps_per_epoch
    assert order.epochs(order.steps_per_epoch) == batch / samples and plain.epochs(step) == step / plain.steps_per_epoch
    whole, once = order.batch(step, 0, batch), plain.batch(step, 0, samples)
    assert whole.epoch == once.epoch and whole.mask.all()
    assert np.array_equal(whole.shard, np.tile(once.shard, repeats)[:batch])
    assert np.array_equal(whole.position, np.tile(once.position, repeats)[:batch])
    assert np.array_equal(whole.view, np.arange(repeats).repeat(samples)[:batch])


@quick
@given(shard_lists, st.integers(1, 30), st.integers(1, 9), st.data())
def test_evaluation_has_every_sample_or_row_once_on_any_number_of_ranks(shard_samples, share, world, data):
    expected = [(shard, position) for shard, size in enumerate(shard_samples) for position in range(size)]
    rows = (
        sorted(data.draw(st.sets(st.integers(0, len(expected) - 1)))) if expected and data.draw(st.booleans()) else None
    )
    expected = expected if rows is None else [expected[row] for row in rows]
    order = EvalOrder(shard_samples, share * world, None if rows is None else np.array(rows, np.int64))
    assert (order.num_samples, order.steps) == (len(expected), -(-len(expected) // (share * world)))
    seen, fillers = [], 0
    for step in range(order.steps):
        shard, position, mask, _ = batch_of_ranks(order, step, world)
        assert np.all(position < np.asarray(shard_samples)[shard])  # fillers are readable, too
        assert set(shard.tolist()) <= set(order.upcoming(step, 0, share * world))
        seen += list(zip(shard[mask].tolist(), position[mask].tolist(), strict=True))
        fillers += int(np.sum(~mask))
    assert seen == expected
    assert fillers == order.steps * share * world - order.num_samples < share * world


@quick
@given(shard_lists, st.integers(1, 30), st.integers(1, 9), windows, st.data())
def test_evaluation_announces_shards_in_the_order_of_need(shard_samples, share, world, window, data):
    """Of a window's samples, found in the batches themselves, one after another."""
    order = EvalOrder(shard_samples, share * world)
    rank, step = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, order.steps))
    slots = rank * share, (rank + 1) * share
    needed = {}
    for ahead in range(step, min(order.steps, step + max(window // share, 1))):
        needed |= dict.fromkeys(order.batch(ahead, *slots).shard.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "WINDOW_SAMPLES", window)
        assert order.upcoming(step, *slots) == list(needed)
