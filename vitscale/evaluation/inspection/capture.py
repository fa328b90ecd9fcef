"""Observes attention while a model computes it: catches queries and keys, and recomputes the weights in chunks.

Attention is one fused call everywhere, so a layer's weights never exist as a tensor. What is observed are the call's
arguments: queries and keys after norms and rotations, and the bias that relative positions add. No layer is changed.

Shape legend: B images, or lines of axial attention, A heads, T tokens, Q queries of a chunk, d width of a head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CHUNK = 2**21
"""The number of attention weights that exist at once: 8 MB, about what stays in a processor's cache."""


class Attending(NamedTuple):
    """One attention call: queries (B, A, T, d), keys (B, A, T', d), and the bias to add to logits, broadcast."""

    query: Tensor
    key: Tensor
    bias: Tensor | None


class Chunk(NamedTuple):
    """The attention weights of some images and queries, fp32 (b, A, Q, T'), and their `entropy` in nats, (b, A, Q)."""

    images: slice
    queries: slice
    weights: Tensor
    entropy: Tensor


@contextmanager
def watching(modules: Mapping[nn.Module, str], observe: Callable[[str, Attending], None]) -> Iterator[None]:
    """Within this context `observe` is called with each attention call of these modules, and the module's name."""
    with ExitStack() as stack:
        mode = _Watch(observe)
        for module, name in modules.items():
            stack.callback(module.register_forward_pre_hook(_sets(mode, name)).remove)
            stack.callback(module.register_forward_hook(_sets(mode, None)).remove)
        stack.enter_context(mode)
        yield


def _sets(mode: "_Watch", name: str | None) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        mode.name = name

    return hook


class _Watch(TorchFunctionMode):
    """Sees every call of a torch function within its context; `name` is the watched layer that computes, if any."""

    name: str | None = None

    def __init__(self, observe: Callable[[str, Attending], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.name is not None:
            query, key, _ = args
            self._observe(self.name, Attending(query, key, kwargs.get("attn_mask")))
        return func(*args, **kwargs)


def chunks(attending: Attending) -> Iterator[Chunk]:
    """The attention weights of all images and queries, in chunks."""
    query, key, bias = attending
    B, A, T, d = query.shape
    keys = key.shape[2]
    queries = max(1, min(T, _CHUNK // (A * keys)))
    images = max(1, _CHUNK // (A * keys * T)) if queries == T else 1
    if bias is not None:
        bias = bias.expand(B, A, T, keys)
    for first in range(0, B, images):
        these = slice(first, min(first + images, B))
        transposed = key[these].float().transpose(-1, -2)
        scaled = query[these].float() * d**-0.5
        for start in range(0, T, queries):
            rows = slice(start, min(start + queries, T))
            logits = scaled[:, :, rows] @ transposed
            if bias is not None:
                # A bias of -inf masks a key; 0 x -inf would make the entropy NaN.
                logits = (logits + bias[these, :, rows].float()).clamp_min_(-1e30)
            norm = logits.logsumexp(dim=-1, keepdim=True)
            weights = torch.exp(logits - norm)
            entropy = norm.squeeze(-1) - torch.linalg.vecdot(weights, logits)
            yield Chunk(these, rows, weights, entropy)
