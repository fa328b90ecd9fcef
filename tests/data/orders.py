"""What an order shows, for the tests of orders."""

import numpy as np


def numbered(shard_samples, slots):
    """Samples as numbers, int64 (slots,): the shards one after another, whatever the epoch."""
    begins = np.cumsum(shard_samples) - shard_samples
    assert np.all((slots.position >= 0) & (slots.position < np.asarray(shard_samples)[slots.shard]))
    return begins[slots.shard] + slots.position


def epoch_of(order, shard_samples, epoch):
    """Samples of an epoch, int64 (batches, G)."""
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return np.stack([numbered(shard_samples, order.batch(step, 0, order.global_batch)) for step in steps])
