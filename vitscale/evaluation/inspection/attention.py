"""Measures attention: how far it reaches, how spread out it is, what it looks at (section 4.5, appendices D.6 and D.7).

Shape legend: B images, k pictures of which maps are made, A heads, T tokens, N patches, n patches on a side, L layers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitscale.evaluation.inspection.capture import Attending, chunks
from vitscale.models.anatomy import Along, Anatomy

POOLING = "pooling"
"""The layer name for the attention of a model's pooling."""


@dataclass
class Reach:
    """How far the heads of one layer look: means over the patches' queries, one row for each image.

    Attributes:
        distance: mean distance in pixels from the query's patch to the patches that it attends to, weighted by
            attention, (B, A); attention to other tokens does not count.
        entropy: entropy of attention over all tokens in nats, (B, A).
        on_patches: the share of attention that goes to patches, (B, A).
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
    """Measures the attention that `capture.watching` reports, call by call, for one batch of images after another.

    Args:
        anatomy: the model's anatomy.
        pictures: the number of images, the first ones, of which maps are made.

    Attributes:
        reach: name of a layer -> the reach for each batch.
        maps: name of a layer -> for each batch (k, N): what the class token attends to, as a mean over heads; or, if
            the representation is read from the patches, what these attend to.
        rollout: for each batch (k, N): how much of each patch the representation is made of, by attention alone.
    """

    anatomy: Anatomy
    pictures: int = 0
    reach: dict[str, list[Reach]] = field(default_factory=dict)
    maps: dict[str, list[Tensor]] = field(default_factory=dict)
    rollout: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._along = {layer.name: layer.along for layer in self.anatomy.attention}
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
            reach, averaged = self._measure(attending, self._along[name])
            self.reach.setdefault(name, []).append(reach)
            if self._wanted:
                self.maps.setdefault(name, []).append(self._mix(averaged, self._along[name]).cpu())
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

    def _measure(self, attending: Attending, along: Along) -> tuple[Reach, Tensor]:
        """The reach, and the first images' attention as a mean over heads: (k, T, T), or (k n, n, n) for lines."""
        B, A, T, _ = attending.query.shape
        before, grid = self.anatomy.before, self.anatomy.grid
        assert grid is not None, "a model with attention has a grid"
        apart = distances(grid, self.anatomy.stride, along).to(attending.query.device)
        lines = B // self._images
        sums, averaged = apart.new_zeros(3, B, A), apart.new_empty(self._wanted * lines, T, T)
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
                averaged[mapped, queries] = weights[: mapped.stop - mapped.start].mean(dim=1)
        means = (sums / (T - before)).view(3, self._images, lines, A).mean(dim=2).cpu()
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
