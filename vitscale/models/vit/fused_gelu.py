"""GELU whose backward pass also sums the gradient of the bias before it, in one Triton kernel.

Without it that sum reads the gradient of an MLP's hidden layer, its widest tensor, once more. Needs Triton, and tensors
on a GPU, or Triton's interpreter (`TRITON_INTERPRET=1`). The sizes of tiles are guesses: none was timed.
"""

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F
from triton import language as tl

from vitscale.ground.errors import RecipeError
from vitscale.models.layers import Linear
from vitscale.models.vit.encoder import MLP

_ROWS = tl.constexpr(256)  # that one program sums, tile after tile
_TILE_ROWS, _TILE_COLUMNS = tl.constexpr(32), tl.constexpr(128)


@triton.jit
def _backward_kernel(towards, before, gradient, partial, rows, columns, IS_TANH: tl.constexpr):
    column = tl.program_id(1) * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)
    total = tl.zeros([_TILE_ROWS, _TILE_COLUMNS], tl.float32)
    for start in range(0, _ROWS, _TILE_ROWS):
        row = tl.program_id(0) * _ROWS + start + tl.arange(0, _TILE_ROWS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        if IS_TANH:  # (1 + tanh(u)) / 2 = sigmoid(2 u)
            share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        else:
            slope = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        found = tl.load(towards + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(gradient + at, found.to(gradient.dtype.element_ty), mask=inside)
        total += found
    tl.store(partial + tl.program_id(0) * columns + column, tl.sum(total, axis=0), mask=column < columns)


@torch.library.custom_op("vitscale::gelu_backward", mutates_args=())
def gelu_backward(towards: Tensor, before: Tensor, is_tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradients of GELU's input `before` (..., C) and of a bias in it (C,) from its output's; computed in fp32."""
    towards, before = towards.contiguous(), before.contiguous()
    rows, columns = before.numel() // before.shape[-1], before.shape[-1]
    gradient = torch.empty_like(before)
    partial = before.new_empty(triton.cdiv(rows, _ROWS.value), columns, dtype=torch.float32)
    kernel = _backward_kernel[len(partial), triton.cdiv(columns, _TILE_COLUMNS.value)]
    kernel(towards, before, gradient, partial, rows, columns, is_tanh)
    return gradient, partial.sum(0).to(before.dtype)


@gelu_backward.register_fake
def _(towards: Tensor, before: Tensor, is_tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before, memory_format=torch.contiguous_format), before.new_empty(before.shape[-1])


class _Gelu(torch.autograd.Function):
    """GELU of what already contains a bias, which gets its gradient here."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, bias: Tensor, is_tanh: bool) -> Tensor:
        ctx.save_for_backward(before)
        ctx.is_tanh = is_tanh
        return F.gelu(before, approximate="tanh" if is_tanh else "none")

    @staticmethod
    def backward(ctx: Any, *towards: Tensor) -> tuple[Tensor, Tensor, None]:
        return *gelu_backward(towards[0], *ctx.saved_tensors, ctx.is_tanh), None


class _FirstLayer(Linear):
    """A dense layer that leaves the gradient of its bias to what follows."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias.detach())


class _FusedMLP(MLP):
    def _activated(self, x: Tensor) -> Tensor:
        return _Gelu.apply(x, self.fc1.bias, self.kind == "gelu")


def fuse_gelu(model: nn.Module) -> None:
    """Have all MLPs with GELU use the kernel; parameters and names stay. Raises `RecipeError` if there are none."""
    found = [module for module in model.modules() if isinstance(module, MLP) and module.kind in ("gelu", "exact_gelu")]
    if not found:
        raise RecipeError("parallelism.fused_gelu is for MLPs with GELU, and this model has none: leave it false")
    for module in found:
        module.__class__, module.fc1.__class__ = _FusedMLP, _FirstLayer
