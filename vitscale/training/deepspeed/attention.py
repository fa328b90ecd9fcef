"""Chooses among torch's implementations of attention."""

import contextlib
from collections.abc import Set
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitscale.recipe import Recipe

Kind = Literal["auto", "flash", "cudnn", "efficient", "math"]

_HOPPER = (9, 0)
_FIRST_RIGHT_CUDNN = 91600  # torch itself takes it first only above 9.15.1, for lengths that 128 does not divide
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_order(
    kind: Kind, lengths: Set[int], *, is_hopper: bool, cudnn: int | None, has_bias: bool = False
) -> list[str] | None:
    """The implementations to use on CUDA, in order, but for those that do not support an input; None for torch's own.

    On Hopper cuDNN's was found to be 1.7 to 2.3 times as fast as flash attention (transformers, pull request 48163).
    Its gradients may not be finite for lengths of 64 modulo 128 (pytorch issue 196678), and it has none for logits
    with a learned bias.

    Args:
        kind: `parallelism.attention`.
        lengths: the numbers of queries that attention sees.
        cudnn: cuDNN's version as torch has it, such as 91900; None without it.
        has_bias: whether logits have a learned bias.
    """
    if kind != "auto":
        return [kind, *(other for other in ("flash", "efficient", "math") if other != kind)]
    if has_bias or (cudnn or 0) < _FIRST_RIGHT_CUDNN or any(length % 128 == 64 for length in lengths):
        return ["flash", "efficient", "math"]
    return ["cudnn", "flash", "efficient", "math"] if is_hopper else None


class Attention:
    """The order in which a recipe's training on a device tries implementations of attention; torch's own on CPUs."""

    def __init__(self, device: torch.device, recipe: Recipe | None = None) -> None:
        self.order: list[str] | None = None
        if device.type == "cuda":
            is_hopper, cudnn = torch.cuda.get_device_capability(device) == _HOPPER, torch.backends.cudnn.version()
            kind: Kind = "auto" if recipe is None else recipe.parallelism.attention
            lengths = set() if recipe is None else _lengths(recipe)
            has_bias = recipe is not None and recipe.model.has_attention_bias
            self.order = attention_order(kind, lengths, is_hopper=is_hopper, cudnn=cudnn, has_bias=has_bias)

    def preferred(self) -> contextlib.AbstractContextManager[None]:
        """A context with this order, also for what is compiled in it."""
        if self.order is None:
            return contextlib.nullcontext()
        tag = f" attention: {', '.join(self.order)}"  # torch's cache of compiled code does not ask for the order
        if tag not in torch.compiler.config.cache_key_tag:
            torch.compiler.config.cache_key_tag += tag
        return sdpa_kernel([_BACKENDS[name] for name in self.order], set_priority=True)

    def without_cudnn(self) -> contextlib.AbstractContextManager[None] | None:
        """A context with flash attention in the place of cuDNN's; None where cuDNN's is not what comes first."""
        if self.order is None or self.order[0] != "cudnn":
            return None
        return sdpa_kernel([_BACKENDS[name] for name in self.order if name != "cudnn"], set_priority=True)


def _lengths(recipe: Recipe) -> set[int]:
    """The numbers of queries that the blocks' attention has in training; empty for a model without tokens."""
    tokens, patches = recipe.model.num_tokens(recipe.data.image_size), recipe.model.patches(recipe.data.image_size)
    kept = recipe.objective.kept(recipe.context)
    if tokens is None:
        return set()
    return {tokens} if kept is None or patches is None else {tokens, tokens - patches.grid**2 + kept}
