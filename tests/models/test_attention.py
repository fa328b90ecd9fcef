"""Attention in every precision and axial attention, against their formulas and full attention under a mask."""

import pytest
import torch
from models.small_models import build, with_values
from torch.nn import functional as F

from vitscale.models.layers import attention
from vitscale.models.resnet.axial import AxialAttention2d, LineAttention
from vitscale.recipe.families import ViTShape


def by_mask(block, x, allowed):
    """A block whose attention sees what `allowed` (T, T) says, over all tokens at once."""
    B, T, D = x.shape
    layer = block.attention
    qkv = layer.qkv(block.norm1(x)).view(B, T, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*qkv, attn_mask=allowed)
    x = x + layer.out(mixed.transpose(1, 2).reshape(B, T, D))
    return x + block.mlp(block.norm2(x))


def test_an_axial_block_is_a_block_within_rows_and_one_within_columns():
    shape = ViTShape(patch_size=8, width=48, depth=1, mlp_dim=96, num_heads=3, attention="axial")
    block = with_values(build(shape, image_size=40, num_classes=7)).eval().blocks[0]
    place = torch.arange(25)
    rows = place[:, None] // 5 == place // 5
    columns = place[:, None] % 5 == place % 5
    x = torch.randn(2, 25, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = by_mask(block.columns, by_mask(block.rows, x, rows), columns)
        assert torch.allclose(block(x), expected, atol=1e-5)


def random_values(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)


def test_line_attention_is_wang_et_al_equation_4():
    """y_o = sum_p softmax_p(q_o k_p + q_o r^q_(p-o) + k_p r^k_(p-o)) (v_p + r^v_(p-o))"""
    n, channels, heads = 5, 24, 3
    lines = LineAttention(channels, n, heads)
    random_values(lines)
    x = torch.randn(2, n, channels, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result = lines(x)
        projected = lines.qkv(x).view(2, n, heads, 16)
        for b in range(2):
            for head in range(heads):
                query, key, value = projected[b, :, head].split([4, 4, 8], dim=-1)
                for o in range(n):
                    of_query, of_key, of_value = lines.relative[[p - o + n - 1 for p in range(n)]].split([4, 4, 8], -1)
                    logits = key @ query[o] + of_query @ query[o] + (key * of_key).sum(-1)
                    expected = (logits / 2).softmax(0) @ (value + of_value)
                    assert torch.allclose(result[b, o, head * 8 : head * 8 + 8], expected, atol=1e-5)


def test_axial_attention_on_a_feature_map():
    layer = AxialAttention2d(64, 5, stride=2)
    random_values(layer)
    x = torch.randn(2, 64, 5, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = torch.stack([layer.rows(x[:, :, i].transpose(1, 2)) for i in range(5)], dim=1)  # (B, h, w, C)
        both = torch.stack([layer.columns(rows[:, :, j]) for j in range(5)], dim=2)
        expected = F.avg_pool2d(both.permute(0, 3, 1, 2), 2, ceil_mode=True)
        result = layer(x)
    assert result.shape == (2, 64, 3, 3)
    assert torch.allclose(result, expected, atol=1e-5)


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
