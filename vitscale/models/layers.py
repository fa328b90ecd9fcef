"""Layers that the families share.

Their values are unset: `models.initialise` and the readers of weights are the only two sources of values, so that what
a weight starts as never depends on how or where a module was built.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitscale.ground.errors import RecipeError
from vitscale.models.initialise import Unfilled

LAYER_NORM_EPS = 1e-6
CHANNELS = 3
_FEW_KEYS = 256


class Linear(Unfilled, nn.Linear):
    """`nn.Linear`, values unset."""


class OutputLayer(Linear):
    """The output layer: logits in fp32.

    With a bias of -10 logits in bf16 would be multiples of 1/16 and many of them equal, so the bias is added in fp32.
    """

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.linear(x_BD, self.weight).float() + self.bias.float()


class LayerNorm(Unfilled, nn.LayerNorm):
    """Layer norm over the last dimension, values unset."""

    def __init__(self, width: int, eps: float = LAYER_NORM_EPS) -> None:
        super().__init__(width, eps=eps)


class RMSNorm(Unfilled, nn.RMSNorm):
    """Division by the root of the mean square over the last dimension, and a factor of each channel; values unset."""

    def __init__(self, width: int, eps: float = LAYER_NORM_EPS) -> None:
        super().__init__(width, eps=eps)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of queries (B, A, T, d) over keys and values (B, A, N, d); `bias` is added to the logits.

    It is torch's own, but products of matrices for gradients in bf16 on CPUs, for up to 256 keys: torch's backward pass
    takes 1.7 to 7 times as long there.
    """
    if query.is_cpu and query.dtype == torch.bfloat16 and query.requires_grad and key.shape[-2] <= _FEW_KEYS:
        logits = (query * query.shape[-1] ** -0.5) @ key.mT
        return (logits if bias is None else logits + bias).softmax(-1) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def relative_table(tokens: int, width: int) -> nn.Parameter:
    """An embedding of every offset within a sequence: row o belongs to the offset o - (tokens - 1)."""
    return nn.Parameter(torch.empty(2 * tokens - 1, width))


def check_size(images_BHWC: Tensor, image_size: int) -> None:
    """Raise `ValueError` for images that the model was not built for: a part of them would silently be lost."""
    expected = (image_size, image_size, CHANNELS)
    if tuple(images_BHWC.shape[1:]) != expected:
        raise ValueError(f"images of shape {tuple(images_BHWC.shape)}; this model takes (batch, *{expected})")


def cut_patches(x_BHWC: Tensor, patch_size: int) -> Tensor:
    """(B, H, W, C) -> (B, N, P * P * C), patches in row-major order, each flattened as height, width, channel.

    P divides H and W.
    """
    B, H, W, C = x_BHWC.shape
    P, h, w = patch_size, H // patch_size, W // patch_size
    return x_BHWC.reshape(B, h, P, w, P, C).permute(0, 1, 3, 2, 4, 5).reshape(B, h * w, P * P * C)


def check_layers(layers: Sequence[int] | None, count: int) -> Sequence[int]:
    """The layers asked for, by default all. Raises `RecipeError` unless they are whole numbers from 1 to `count`."""
    if layers is None:
        return range(1, count + 1)
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise RecipeError(f"layers={layers!r}: expected a list of numbers from 1 to {count}")
    is_one = [isinstance(each, Integral) and not isinstance(each, bool) and 1 <= each <= count for each in layers]
    if not all(is_one):
        wrong = [each for each, is_right in zip(layers, is_one, strict=True) if not is_right]
        raise RecipeError(f"layers {wrong}: this model has the layers 1 to {count}")
    return layers


def run_block(model: Any, index: int, block: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Run a block of a model; of every `checkpoint_every`-th the backward pass recomputes the activations."""
    every = model.checkpoint_every if model.training and torch.is_grad_enabled() else 0
    if every > 0 and index % every == 0:
        result = checkpoint(block, *inputs, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result
    return block(*inputs)


def drop_path(branch: Tensor, share: float, path: Tensor | None) -> Tensor:
    """What a branch adds while training, when it is left out for a `share` of the images: where `path` is not True.

    The branches that stay are scaled up, so that the mean is that of evaluation. None: nothing is left out.
    """
    return branch if path is None or share == 0 else branch / (1 - share) * path


def no_record(name: str, value: Tensor) -> None:
    """Discards the intermediate results of a forward pass, while nobody asks for them."""
