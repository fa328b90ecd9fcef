"""Masked patch prediction (section 4.6, appendix B.1.2): self-supervision as BERT's, on patches.

Patch embeddings are corrupted before class token and positions are added, so where a patch lies stays known. Which
ones, and how, is a function of each sample's key, so that it is the same on every world and after resuming.

Shape legend: B batch, S side in pixels, N patches, C corrupted patches, P patch size, D width, G grid.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.data.draws import Purpose, between_ratios, orders, uniform
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.layers import OutputLayer
from vitscale.objectives.objective import Losses, Objective, Plan
from vitscale.recipe import Recipe
from vitscale.recipe.masked_patches import CELLS, Counts, MaskedPatches

_LEVELS = 8  # levels of each channel, 3 bits
_SMALLEST, _ASPECTS, _TRIES = 16, (0.3, 1 / 0.3), 10  # BEiT's blocks: patches, height / width, failures before the end


class MaskedPatchPrediction(Objective):
    """Predicts what was seen in corrupted patches from their tokens.

    Args:
        backbone: a Transformer without a head, which cuts the image itself into patches.
        settings: the recipe's block.
        counts: the numbers of patches of each image that are corrupted, by kind.
    """

    def __init__(self, backbone: Model, settings: MaskedPatches, counts: Counts) -> None:
        super().__init__(backbone)
        self.settings, self.counts = settings, counts
        self.mask = torch.nn.Parameter(torch.empty(1, 1, backbone.shape.width))
        self.prediction = OutputLayer(backbone.shape.width, settings.outputs(backbone.shape.patch_size))

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        settings, backbone = recipe.objective, build_model(recipe, None)
        assert isinstance(settings, MaskedPatches)
        return cls(backbone, settings, settings.counts(recipe.context))

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """A random order of each image's patches, (B, N) int64: masked, replaced, kept, and then those left intact."""
        grid = self.backbone.shape.grid(self.backbone.image_size)
        order = orders(keys.view(np.uint64), grid**2, Purpose.PATCH_ORDER)
        if self.settings.masks == "blocks":
            in_blocks = np.take_along_axis(blocks(keys, grid, self.counts.corrupted), order, axis=1)
            order = np.take_along_axis(order, np.argsort(~in_blocks, axis=1, kind="stable"), axis=1)
        return (torch.from_numpy(order),)

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: means over corrupted patches, in nats, or of squares in units of half the range."""
        images, (order_BN,) = views[0][:, 0], plan
        corrupted_BC = order_BN[:, : self.counts.corrupted]
        tokens_BTD = self.backbone(images, edit=lambda x_BND: self._corrupt(x_BND, order_BN)).tokens
        predicted = self.prediction(rows(self.backbone.patch_tokens(tokens_BTD), corrupted_BC))
        if self.settings.targets is not None:
            assert self._taught_by, "the tokenizer is given before the first step"
            return _named(predicted, self._taught_by[0](images).gather(1, corrupted_BC)[..., None], "token_accuracy")
        pixels = whole_pixels(rows(self.backbone.patchify(images), corrupted_BC))
        if self.settings.target == "pixels":
            return Losses((predicted - (pixels / 127.5 - 1)).square().mean(dim=(1, 2)))
        cells = CELLS if self.settings.target == "cell_colours" else 1
        return _named(predicted, quantised_colours(pixels, self.backbone.shape.patch_size, cells), "colour_accuracy")

    def _corrupt(self, x_BND: Tensor, order_BN: Tensor) -> Tensor:
        """Patch embeddings, some of them replaced by another patch's or by [mask]."""
        masked, replaced, kept = self.counts
        changed = order_BN[:, : masked + replaced]
        # Each replaced patch becomes another one in the order, no two the same: gradients of sources that coincide
        # would be added in any order.
        at = torch.arange(masked, masked + replaced, device=order_BN.device) + replaced + kept
        others = order_BN[:, at % order_BN.shape[1]]
        values = torch.cat([self.mask.expand(len(x_BND), masked, -1), rows(x_BND, others)], dim=1)
        return x_BND.scatter(1, changed[..., None].expand_as(values), values)

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: [mask] begins as a position embedding, the prediction at zero, as an output."""
        if name == "mask":
            return normal(0.02)
        return constant(0.0) if name.startswith("prediction.") else super().initialiser(name)


def _named(predicted: Tensor, classes: Tensor, accuracy: str) -> Losses:
    """Cross-entropies of logits (B, C, n K), for n classes of each patch, int64 (B, C, n)."""
    predicted = predicted.unflatten(2, (classes.shape[2], -1))
    losses = F.cross_entropy(predicted.flatten(0, 2), classes.flatten(), reduction="none").view(classes.shape)
    is_right = (predicted.detach().argmax(dim=3) == classes).float()
    return Losses(losses.mean(dim=(1, 2)), {accuracy: is_right.mean(dim=(1, 2))})


def blocks(keys: np.ndarray, grid: int, count: int) -> np.ndarray:
    """Which patches lie in BEiT's blocks, bool (B, G * G): at most `count` for each key (B,), and seldom fewer.

    As microsoft/unilm's `MaskingGenerator` draws them: a block has from 16 patches to as many as are left, is lower
    than the grid and narrower, and is taken if it adds some, but no more than are left. Ten refused in turn end it.
    """
    taken = np.zeros((len(keys), grid, grid), bool)
    failures, attempt, lines = np.zeros(len(keys), int), 0, np.arange(grid)
    while len(trying := np.flatnonzero((taken.sum(axis=(1, 2)) < count) & (failures < _TRIES))):
        left = count - taken[trying].sum(axis=(1, 2))
        area, aspect, top, place = (uniform(keys[trying], Purpose.BEIT_BLOCK, attempt, number) for number in range(4))
        area, aspect = _SMALLEST + (left - _SMALLEST) * area, between_ratios(_ASPECTS, aspect)
        height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        top, place = np.floor(top * (grid - height + 1)), np.floor(place * (grid - width + 1))
        is_row = (lines >= top[:, None]) & (lines < (top + height)[:, None])
        is_column = (lines >= place[:, None]) & (lines < (place + width)[:, None])
        added = is_row[:, :, None] & is_column[:, None, :] & ~taken[trying]
        number = added.sum(axis=(1, 2))
        fits = (height < grid) & (width < grid) & (number > 0) & (number <= left)
        taken[trying] |= added & fits[:, None, None]
        failures[trying] = np.where(fits, 0, failures[trying] + 1)
        attempt += 1
    return taken.reshape(len(keys), -1)


def rows(values_BND: Tensor, at_BC: Tensor) -> Tensor:
    """The values of some patches: (B, N, D), (B, C) -> (B, C, D)."""
    return values_BND.gather(1, at_BC[..., None].expand(-1, -1, values_BND.shape[2]))


def whole_pixels(images: Tensor) -> Tensor:
    """Pixels from 0 to 255, fp32, from those in [-1, 1]; exact in bf16 too, whose 8 bits tell x / 127.5 - 1 apart."""
    return ((images.float() + 1) * 127.5).round()


def quantised_colours(patches: Tensor, patch_size: int, cells: int) -> Tensor:
    """The mean colours of the cells of patches, as classes of 3 bits a channel (red the highest).

    Args:
        patches: pixels from 0 to 255, (..., P * P * 3) in the order height, width, channel.
        patch_size: P.
        cells: the number of cells along each side; P is a multiple of it.

    Returns:
        int64 (..., cells * cells), row by row.
    """
    side = patch_size // cells
    by_cell = patches.to(torch.int64).unflatten(-1, (cells, side, cells, side, 3))
    levels = by_cell.sum(dim=(-4, -2)) // (side**2 * (256 // _LEVELS))  # (..., cells, cells, 3)
    red, green, blue = levels.flatten(-3, -2).unbind(-1)
    return (red * _LEVELS + green) * _LEVELS + blue
