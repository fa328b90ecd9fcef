"""Masked autoencoders (He et al., 2022): the backbone sees a quarter of the patches, a small decoder predicts the rest.

Which patches are removed is a function of each sample's key, so that it is the same on every world and after resuming.
All images lose equally many, so the loss is a mean over samples like any other.

Shape legend: B batch, S side in pixels, N patches, K kept and R removed ones, F tokens before the patches, T = F + N
tokens, P patch size, D width of the backbone, E of the decoder.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from vitscale.data.draws import Purpose, orders
from vitscale.ground.weight_formats import Format
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.initialise import xavier_uniform
from vitscale.models.layers import CHANNELS, Linear, OutputLayer, run_block
from vitscale.models.vit.encoder import EncoderBlock, norm_of
from vitscale.models.vit.positions import sincos_positions
from vitscale.models.vit.weights import decoder_rules
from vitscale.models.weights.rules import Rule, same
from vitscale.objectives.masked_patches import rows
from vitscale.objectives.objective import Losses, Objective, Plan
from vitscale.recipe import MAE, Normalise, Recipe
from vitscale.recipe.families import ViTShape

_EPSILON = 1e-6  # added to the variance of a patch


class Decoder(nn.Module):
    """Predicts the pixels of removed patches from the backbone's tokens of the others.

    Args:
        shape: the dimensions of its blocks.
        inputs: D.
        outputs: how many numbers are predicted for one patch.
        grid: patches along one side.
        checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them.
    """

    def __init__(self, shape: ViTShape, inputs: int, outputs: int, grid: int, checkpoint_every: int) -> None:
        super().__init__()
        self.shape, self.grid, self.checkpoint_every = shape, grid, checkpoint_every
        self.embedding = Linear(inputs, shape.width)
        self.blocks = nn.ModuleList(EncoderBlock(shape, dropout=0.0) for _ in range(shape.depth))
        self.norm = norm_of(shape, shape.width)
        self.prediction = OutputLayer(shape.width, outputs)

    def forward(self, tokens_BTD: Tensor, mask_11E: Tensor, kept_BK: Tensor, removed_BR: Tensor) -> Tensor:
        """Predictions (B, R, outputs) in fp32 from the tokens (B, F + K, D); removed patches are `mask_11E`."""
        x_BTE = self.embedding(tokens_BTD)
        first, removed = x_BTE.shape[1] - kept_BK.shape[1], removed_BR.shape[1]
        positions_NE = sincos_positions(self.grid, x_BTE.shape[2], x_BTE, "mae")[0]
        # Attention does not ask for the order of tokens: patches, and their positions, stay in the drawn one.
        masks = mask_11E.expand(len(x_BTE), removed, -1)
        patches = torch.cat([x_BTE[:, first:], masks], dim=1) + positions_NE[torch.cat([kept_BK, removed_BR], dim=1)]
        x_BTE = torch.cat([x_BTE[:, :first], patches], dim=1)
        for index, block in enumerate(self.blocks):
            x_BTE = run_block(self, index, block, x_BTE)
        return self.prediction(self.norm(x_BTE[:, -removed:]))


class MaskedAutoencoder(Objective):
    """Predicts the pixels of patches that the backbone does not see.

    Args:
        backbone: a Transformer without a head, which cuts the image itself into patches.
        settings: the recipe's block.
        kept: K.
        normalise: how the images are normalised, if they are of whole pixels, which bf16 tells apart; else None, and
            targets are the pixels as the model gets them.
        checkpoint_every: as `Decoder`'s.
    """

    def __init__(
        self, backbone: Model, settings: MAE, kept: int, normalise: Normalise | None, checkpoint_every: int = 0
    ) -> None:
        super().__init__(backbone)
        self.kept, self.normalise, self.norm_pix = kept, normalise, settings.norm_pix
        shape, model = settings.decoder_shape, backbone.shape
        self.mask = nn.Parameter(torch.empty(1, 1, shape.width))
        outputs, grid = CHANNELS * model.patch_size**2, model.grid(backbone.image_size)
        self.decoder = Decoder(shape, model.width, outputs, grid, checkpoint_every)

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        settings, backbone = recipe.objective, build_model(recipe, None)
        assert isinstance(settings, MAE)
        every, normalise = recipe.parallelism.activation_checkpointing, recipe.data.normalise
        are_whole = all(operation.pixels == "uint8" for operation in recipe.data.operations)
        known = normalise if are_whole and tells_levels_apart(normalise) else None
        return cls(backbone, settings, settings.kept(recipe.context), known, every)

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: the kept patches (B, K) and the removed ones (B, R), int64, in the drawn order."""
        order_BN = torch.from_numpy(orders(keys.view(np.uint64), self.decoder.grid**2, Purpose.REMOVED))
        return order_BN[:, : self.kept], order_BN[:, self.kept :]

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        images, (kept_BK, removed_BR) = views[0][:, 0], plan
        predicted = self.decoder(self.backbone(images, kept=kept_BK).tokens, self.mask, kept_BK, removed_BR)
        target = rows(self.backbone.patchify(images), removed_BR).float()
        if self.normalise is not None:
            target = exact_pixels(target, self.normalise)
        if self.norm_pix:
            spread = (target.var(dim=2, keepdim=True) + _EPSILON).sqrt()  # the unbiased variance, as its authors have
            target = (target - target.mean(dim=2, keepdim=True)) / spread
        return Losses((predicted - target).square().mean(dim=(1, 2)))

    def units(self) -> Sequence[nn.Module]:
        return [*super().units(), *self.decoder.blocks]

    def rules(self, form: Format) -> Sequence[Rule]:
        """As `Objective.rules`: ours, those of MAE's authors, which go with timm's, and transformers'."""
        if form == "safetensors":
            return [same(name, name) for name, _ in self.named_parameters() if not name.startswith("backbone.")]
        return [] if form == "npz" else list(decoder_rules(form, self.decoder.shape, self.decoder.grid))

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`; the decoder's layers begin as its authors', each matrix by itself."""
        layer, _, kind = name.rpartition(".")
        if name == "mask":
            return normal(0.02)
        if not name.startswith("decoder."):
            return super().initialiser(name)
        if kind == "bias":
            return constant(0.0)
        if layer.endswith(("norm", "norm1", "norm2")):
            return constant(1.0)
        return xavier_uniform(3 if layer.endswith("qkv") else 1)


def tells_levels_apart(normalise: Normalise) -> bool:
    """Whether `exact_pixels` gives back each of the 256 levels of each channel after it was rounded to bf16."""
    levels = np.arange(256, dtype=np.float32)[:, None]
    mean, std = (np.array(each, np.float32) for each in (normalise.mean, normalise.std))
    bits = np.ascontiguousarray((levels / 255 - mean) / std).view(np.uint32)
    to_even = bits + 0x7FFF + (bits >> 16 & 1)  # not by torch, which may be counting tensors without values
    rounded = (to_even & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return bool((np.rint((rounded * std + mean) * 255) == levels).all())


def exact_pixels(patches: Tensor, normalise: Normalise) -> Tensor:
    """Normalised pixels (..., P * P * 3) in fp32, from such pixels that may have been rounded to bf16.

    Pixels are whole numbers from 0 to 255, which eight bits tell apart in [-1, 1] and as ImageNet's are normalised.
    Rounded ones would be wrong by half a level, and a smooth patch has little more than that to predict.
    """
    pixels = patches.float().unflatten(-1, (-1, CHANNELS))
    whole = (
        ((channel * std + mean) * 255).round()
        / 255  # numbers on the host: no copy to the device that it would wait for
        for channel, mean, std in zip(pixels.unbind(dim=-1), normalise.mean, normalise.std, strict=True)
    )
    exact = [(each - mean) / std for each, mean, std in zip(whole, normalise.mean, normalise.std, strict=True)]
    return torch.stack(exact, dim=-1).flatten(-2)
