"""The order of evaluation: every sample once, on any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data import EvalOrder


@pytest.mark.parametrize("world", [1, 2, 3])
@settings(max_examples=40, deadline=None)
@given(shard_samples=st.lists(st.integers(0, 40), min_size=1, max_size=12), per_rank=st.integers(1, 30))
def test_every_sample_once_in_order_and_as_many_batches_on_every_rank(world, shard_samples, per_rank):
    batch = per_rank * world
    order = EvalOrder(shard_samples, batch)
    assert (order.num_samples, order.steps) == (sum(shard_samples), -(-sum(shard_samples) // batch))
    seen, fillers = [], 0
    for step in range(order.steps):
        for rank in range(world):
            slots = order.batch(step, rank * per_rank, (rank + 1) * per_rank)
            assert slots.epoch == 0
            assert len(slots.shard) == len(slots.position) == len(slots.mask) == per_rank
            assert np.all(slots.position < np.asarray(shard_samples)[slots.shard])  # fillers are readable, too
            places = zip(slots.shard.tolist(), slots.position.tolist(), strict=True)
            seen += [place for place, real in zip(places, slots.mask, strict=True) if real]
            fillers += int((~slots.mask).sum())
    assert seen == [(shard, position) for shard, size in enumerate(shard_samples) for position in range(size)]
    assert fillers == order.steps * batch - order.num_samples < batch


@pytest.mark.parametrize("shard_samples", [[], [0], [0, 0]])
def test_nothing_to_evaluate(shard_samples):
    order = EvalOrder(shard_samples, 32)
    assert (order.num_samples, order.steps) == (0, 0)
