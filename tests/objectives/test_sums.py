"""Sums over the global batch: the same bits in any order and parts; what is agreed, dealt to micro-batches."""

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
