"""Watches attention while a model computes it: how far it reaches, how spread out it is, what it looks at.

Section 4.5 of the paper, appendices D.6 and D.7. Attention is one fused call everywhere, so a layer's weights never
exist as a tensor. What is caught are the call's arguments: queries and keys after norms and rotations, and the bias
that relative positions add; the weights are recomputed from them in chunks. No layer is changed.

Shape legend: B images, or lines of axial attention, k pictures of which maps are made, A heads, T tokens, Q queries of
a chunk, d width of a head, N patches, n patches on a side, L layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitscale.models.anatomy import Along, Anatomy, AttentionLayer, Windows

_CHUNK = 2**21  # the number of attention weights that exist at once: 8 MB, about what stays in a processor's cache


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
            stack.callback(module.register_forward_pre_hook(partial(mode.set_name, name)).remove)
            stack.callback(module.register_forward_hook(partial(mode.set_name, None)).remove)
        stack.enter_context(mode)
        yield


class _Watch(TorchFunctionMode):
    """Sees every call of a torch function within its context; `name` is the watched layer that computes, if any."""

    name: str | None = None

    def __init__(self, observe: Callable[[str, Attending], None]) -> None:
        super().__init__()
        self._observe = observe

    def set_name(self, name: str | None, *_: Any) -> None:
        self.name = name

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


POOLING = "pooling"  # the layer name for the attention of a model's pooling


@dataclass
class Reach:
    """How far the heads of one layer look: means over the patches' queries, each (B, A).

    Attributes:
        distance: in pixels from the query's patch to the patches that it attends to, weighted by attention; attention
            to other tokens does not count.
        entropy: of attention over all tokens, in nats.
        on_patches: the share of attention that goes to patches.
    """

    distance: Tensor
    entropy: Tensor
    on_patches: Tensor


def distances(grid: int, stride: int, along: Along) -> Tensor:
    """Distances between the centres of patches in pixels: (N, N), or (n, n) along one line."""
    steps = torch.arange(grid, dtype=torch.float32) * stride
    if along != "grid":
        return (steps[:, None] - steps).abs()
    places = torch.cartesian_prod(steps, steps)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass
class AttentionMeter:
    """Measures the attention that `watching` reports, call by call, for one batch of images after another.

    Attributes:
        anatomy: the model's.
        pictures: the number of images, the first ones, of which maps are made.
        reach: name of a layer -> the reach for each batch.
        maps: name of a layer -> for each batch (k, N): what the class token attends to, as a mean over heads; or, if
            the representation is read from the patches, what these attend to; of windows (k, positions of the map).
        rollout: for each batch (k, N): how much of each patch the representation is made of, by attention alone.
    """

    anatomy: Anatomy
    pictures: int = 0
    reach: dict[str, list[Reach]] = field(default_factory=dict)
    maps: dict[str, list[Tensor]] = field(default_factory=dict)
    rollout: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layers = {layer.name: layer for layer in self.anatomy.attention}
        self._product: Tensor | None = None  # over the layers so far, (k, T, T): row i is what token i is made of
        self._mapped = 0  # the number of pictures done

    def begin(self, images: int) -> None:
        """Begin a batch of so many images."""
        self._images = images
        self._wanted = max(0, min(images, self.pictures - self._mapped))
        self._product = None

    def observe(self, name: str, attending: Attending) -> None:
        """Measure one layer's attention."""
        if name != POOLING:
            layer = self._layers[name]
            reach, averaged = self._measure(attending, layer)
            self.reach.setdefault(name, []).append(reach)
            if self._wanted:
                cut = layer.windows
                shown = self._mix(averaged, layer.along) if cut is None else _unwindowed(averaged, cut)
                self.maps.setdefault(name, []).append(shown.cpu())
        elif self._product is not None:
            first = Attending(attending.query[: self._wanted], attending.key[: self._wanted], None)
            probe = torch.cat([chunk.weights.mean(dim=1) for chunk in chunks(first)])  # (k, 1, T)
            self._finish((probe @ self._product)[:, 0])

    def end(self) -> None:
        """End the batch, which has passed all layers."""
        if self._product is None or self.anatomy.pooling is not None:
            return
        is_first = self.anatomy.reads == "class token"
        self._finish(self._product[:, 0] if is_first else self._product[:, self.anatomy.before :].mean(dim=1))

    def _measure(self, attending: Attending, layer: AttentionLayer) -> tuple[Reach, Tensor]:
        """The reach, and the first images' attention as a mean over heads: (k, T, T), or (k n, n, n) for lines.

        Of windows it is what each position receives, a mean over heads and queries: (k, windows, T).
        """
        B, A, T, _ = attending.query.shape
        before, windows = self.anatomy.before, 1
        if layer.windows is not None:
            windows, side, stride = layer.windows[:3]
            apart = distances(side, stride, "grid").to(attending.query.device)
        else:
            assert self.anatomy.grid is not None, "a model with attention has a grid"
            apart = distances(self.anatomy.grid, self.anatomy.stride, layer.along).to(attending.query.device)
        lines = B // self._images
        shape = (T, T) if layer.windows is None else (windows, T)
        sums, averaged = apart.new_zeros(3, B, A), apart.new_zeros(self._wanted * lines, *shape)
        for images, queries, weights, entropy in chunks(attending):
            first = max(before - queries.start, 0)  # the first query that is a patch's
            patches = slice(queries.start + first - before, queries.stop - before)
            to_patches = weights[:, :, first:, before:]
            on_patches = to_patches.sum(dim=-1)
            reached = torch.einsum("baqt,qt->baq", to_patches, apart[patches])
            sums[0, images] += (reached / on_patches.clamp_min(1e-30)).sum(dim=-1)
            sums[1, images] += entropy[:, :, first:].sum(dim=-1)
            sums[2, images] += on_patches.sum(dim=-1)
            if images.start < len(averaged):
                mapped = slice(images.start, min(images.stop, len(averaged)))
                seen = weights[: mapped.stop - mapped.start]
                if layer.windows is None:
                    averaged[mapped, queries] = seen.mean(dim=1)
                else:
                    averaged[mapped] += seen.sum(dim=2).unflatten(1, (windows, A // windows)).mean(dim=2) / T
        means = (sums / (T - before)).view(3, self._images, lines * windows, A // windows).mean(dim=2).cpu()
        return Reach(*means), averaged

    def _mix(self, averaged: Tensor, along: Along) -> Tensor:
        """Add one more layer to the rollout; returns the layer's map (k, N)."""
        k, n, anatomy = self._wanted, averaged.shape[-1], self.anatomy
        if self._product is None:
            tokens = n if along == "grid" else n * n
            self._product = torch.eye(tokens, device=averaged.device).expand(k, -1, -1)
        product = self._product
        if along == "grid":
            asked = averaged[:, 0] if anatomy.reads == "class token" else averaged[:, anatomy.before :].mean(dim=1)
            shown, mixed = asked[:, anatomy.before :], averaged @ product
        else:
            lines = averaged.view(k, n, n, n)  # picture, line, query, key
            formula = "brij,brjt->brit" if along == "rows" else "bcij,bjct->bict"
            mixed = torch.einsum(formula, lines, product.view(k, n, n, n * n)).reshape(k, n * n, n * n)
            received = lines.mean(dim=2) / n
            shown = (received if along == "rows" else received.transpose(1, 2)).reshape(k, n * n)
        self._product = (mixed + product) / 2
        return shown

    def _finish(self, rows: Tensor) -> None:
        self.rollout.append(rows[:, self.anatomy.before :].cpu())
        self._mapped += self._wanted
        self._product = None


def _unwindowed(received: Tensor, windows: Windows) -> Tensor:
    """What positions of windows receive, (k, windows, T), by their place in the map: (k, size * size)."""
    _, n, _, size, shift = windows
    side = -(-size // n)
    of_map = received.view(-1, side, side, n, n).transpose(2, 3).reshape(-1, side * n, side * n)
    return of_map.roll((shift, shift), (1, 2))[:, :size, :size].flatten(1)
