"""The order of evaluation: its ends. What holds for all of them stands in test_order_properties.py."""

import pytest

from vitscale.data.order import WINDOW_SAMPLES, EvalOrder


@pytest.mark.parametrize("shard_samples", [[], [0], [0, 0]])
def test_nothing_to_evaluate(shard_samples):
    order = EvalOrder(shard_samples, 32)
    assert (order.num_samples, order.steps) == (0, 0)
    assert order.upcoming(0, 0, 32) == []


def test_fillers_of_a_rank_repeat_the_first_sample_and_need_its_shard():
    order = EvalOrder([0, 4, 5], 6)
    last = order.batch(1, 3, 6)
    assert (last.shard.tolist(), last.position.tolist(), last.mask.tolist()) == ([1] * 3, [0] * 3, [False] * 3)
    assert order.upcoming(1, 3, 6) == [1]
    assert order.upcoming(1, 0, 6) == [2, 1]
    assert order.upcoming(2, 0, 6) == []


def test_evaluation_announces_as_many_samples_as_a_window_has():
    """One rank of two: batches of 2 x 1,024, hence 64 batches ahead, 131,072 samples of both."""
    order = EvalOrder([8192] * 100, 2048)
    assert WINDOW_SAMPLES == 64 * 1024
    assert order.upcoming(0, 1024, 2048) == list(range(16))
    assert order.upcoming(10, 1024, 2048) == list(range(2, 19))
    assert order.upcoming(399, 1024, 2048) == [99]
