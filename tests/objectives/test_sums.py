"""Sums over the global batch: the same bits in any order and parts; what is agreed, dealt to micro-batches."""

import math

import pytest
import torch

from vitscale.ground.ranks import Sums
from vitscale.objectives.objective import dealt, joined


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_total_has_the_same_bits_in_any_order_and_any_parts(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(640, 64, generator=generator) / 0.04
    terms = torch.softmax(logits, dim=1).to(dtype)
    total = Sums().total(terms)
    assert total.dtype == dtype
    torch.testing.assert_close(total.double(), terms.double().sum(dim=0), rtol=1e-7, atol=640 * 2**-41)
    shuffled = terms[torch.randperm(640, generator=generator)]
    for parts in (1, 3, 64, 640):
        assert torch.equal(Sums().total(iter(shuffled.chunk(parts))), total)
    assert torch.equal(Sums().total(-terms), -total)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0, 3e7])
def test_what_integers_cannot_hold_is_told_whatever_else_is_added(wrong):
    """Two NaN would add up to 0 in integers of 64 bits."""
    rows = torch.ones(4, 3)
    rows[1, 0] = rows[3, 0] = wrong
    assert Sums().total(rows).isnan().all() and Sums().total(iter(rows.split(1))).isnan().all()
    assert Sums().total(torch.ones(4)).item() == 4 and Sums().total(torch.empty(0, 3)).tolist() == [0, 0, 0]
    most = torch.ones(1).expand(2**22)
    assert Sums().total(most).item() == 2**22
    with pytest.raises(ValueError, match="rows"):
        Sums(0, 2).total(most)


def test_rows_are_each_rank_s_own():
    whole = torch.arange(12).view(6, 2)
    assert [Sums(rank, 3).own(whole).tolist() for rank in range(3)] == [each.tolist() for each in whole.split(2)]


def test_rows_come_back_to_the_micro_batch_that_made_them():
    made = [(torch.full((4, 2), number), torch.full((2, 3), number), torch.empty(0, 5)) for number in range(3)]
    again = dealt(joined(made), 3)
    assert all(
        torch.equal(*each) for one, other in zip(made, again, strict=True) for each in zip(one, other, strict=True)
    )
    assert dealt((), 2) == [(), ()] and torch.equal(joined([made[0][0], made[1][0]])[4:], made[1][0])
    with pytest.raises(AssertionError):
        dealt((torch.zeros(5),), 2)
