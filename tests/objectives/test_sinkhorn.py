"""Sinkhorn's targets against the published loop in double precision, and the same bits for any parts."""

import pytest
import torch

from vitscale.ground.ranks import Sums
from vitscale.objectives.dino_losses import potentials, targets


def published(logits):
    """facebookresearch/dinov2, dino_clstoken_loss.py: sinkhorn_knopp_teacher, in double precision."""
    Q = logits.double().exp().t()
    B, K = Q.shape[1], Q.shape[0]
    Q /= Q.sum()
    for _ in range(3):
        Q /= Q.sum(dim=1, keepdim=True)
        Q /= K
        Q /= Q.sum(dim=0, keepdim=True)
        Q /= B
    return (Q * B).t()


def rows(count, prototypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    each = torch.nn.functional.normalize(torch.randn(count, 16, generator=generator), dim=1)
    to = torch.nn.functional.normalize(torch.randn(prototypes, 16, generator=generator), dim=1)
    return each @ to.T


@pytest.mark.parametrize("temperature", [0.04, 0.07])
@pytest.mark.parametrize("count", [1, 5, 256])
def test_targets_are_those_of_the_published_loop(temperature, count):
    logits = rows(count, 48) / temperature
    found = targets(logits, potentials(lambda: [logits], Sums()))
    torch.testing.assert_close(found.double(), published(logits), rtol=0, atol=3e-7)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(count))


def test_any_parts_in_any_order_have_the_same_bits():
    logits = rows(96, 40) / 0.04
    expected = potentials(lambda: [logits], Sums())
    for size in (1, 8, 32):
        parts = list(reversed(logits.split(size)))
        assert torch.equal(potentials(lambda parts=parts: parts, Sums()), expected)


def test_large_logits_and_prototypes_that_nobody_is_near_are_harmless():
    logits = rows(64, 40) / 0.04
    torch.testing.assert_close(
        targets(logits + 300, potentials(lambda: [logits + 300], Sums())),
        targets(logits, potentials(lambda: [logits], Sums())),
        rtol=0,
        atol=2e-5,
    )
    logits[:, 3] = -1e4
    found = targets(logits, potentials(lambda: [logits], Sums()))
    assert torch.isfinite(found).all() and found[:, 3].sum() > 0
