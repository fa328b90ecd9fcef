"""Attention in every precision against its formula in double precision."""

import pytest
import torch

from vitscale.models.layers import attention

B, A, d = 3, 2, 32


@pytest.mark.parametrize("keys", [1, 65, 300])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
def test_values_and_gradients_are_those_of_the_formula(keys, has_bias, dtype, most):
    draw = torch.Generator().manual_seed(keys)
    shapes = [(B, A, 65, d), (B, A, keys, d), (B, A, keys, d), *[(A, 65, keys)] * has_bias]
    inputs = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]
    asked = torch.randn(shapes[0], generator=draw).to(dtype)
    found = attention(*inputs)
    with torch.no_grad():  # as in evaluation
        alone = attention(*inputs)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = exact[0] @ exact[1].mT / d**0.5 + sum(exact[3:])
    expected = torch.exp(logits - logits.logsumexp(-1, keepdim=True)) @ exact[2]
    pairs = [(found, expected), (alone, expected)]
    slopes = zip(
        torch.autograd.grad(found, inputs, asked), torch.autograd.grad(expected, exact, asked.double()), strict=True
    )
    for ours, theirs in [*pairs, *slopes]:
        assert ours.dtype == dtype
        if theirs.norm() > 1e-9:  # with one key the weights are 1 whatever the query is
            assert (ours.double() - theirs).norm() <= most * theirs.norm()
