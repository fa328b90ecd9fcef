"""I-JEPA (Assran et al., 2023; arXiv:2301.08243): predicts what an average of the model makes of blocks of patches.

The sides of the blocks are those of an update, as in its authors' code, and their places and what the model sees are
functions of each sample's key. All images of all updates keep equally many patches, where theirs keep as many as the
image of a micro-batch that has the fewest.

Shape legend: B batch, N patches, C seen ones, M blocks of an image, K patches of a block, D width of the model.
"""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.data.draws import Purpose, between, between_ratios, combine, orders, stratum, uniform
from vitscale.ground.weight_formats import Format
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.weights.rules import Rule, same
from vitscale.objectives.mae import Decoder
from vitscale.objectives.masked_patches import rows
from vitscale.objectives.objective import Losses, Objective, Plan, Rows
from vitscale.recipe import Recipe

_ASPECT = (0.75, 1.5)  # rows / columns of a block


class IJEPA(Objective):
    """Predicts the teacher's tokens in blocks of patches from the model's tokens of others.

    Args:
        backbone: a Transformer without a head, which cuts the image itself into patches.
        settings: the recipe's block.
        seen: C.
        seed: of the run.
        checkpoint_every: recompute every k-th block's activations in the backward pass; 0 keeps all of them.
    """

    def __init__(
        self, backbone: Model, settings: recipes.IJEPA, seen: int, seed: int, checkpoint_every: int = 0
    ) -> None:
        super().__init__(backbone)
        self.settings, self.seen, self.seed = settings, seen, seed
        shape, model = settings.decoder_shape, backbone.shape
        self.grid = model.grid(backbone.image_size)
        self.mask = nn.Parameter(torch.empty(1, 1, shape.width))
        self.predictor = Decoder(shape, model.width, model.width, self.grid, checkpoint_every)

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        settings, every = recipe.objective, recipe.parallelism.activation_checkpointing
        assert isinstance(settings, recipes.IJEPA)
        return cls(build_model(recipe, None), settings, settings.kept(recipe.context), recipe.seed, every)

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: the seen patches (B, C), and those of the blocks (B, M, K), int64."""
        of_update = np.array([combine(self.seed, Purpose.BLOCK, step)])
        size = between(self.settings.area, uniform(of_update, 0)) * self.grid**2
        aspect = between_ratios(_ASPECT, uniform(of_update, 1))
        height, width = (
            min(max(round(math.sqrt(float(each[0]))), 1), self.grid - 1) for each in (size * aspect, size / aspect)
        )
        blocks = []
        for number in range(self.settings.blocks):
            top = stratum(keys, self.grid - height + 1, Purpose.BLOCK, number, 0)
            left = stratum(keys, self.grid - width + 1, Purpose.BLOCK, number, 1)
            inside = np.arange(height)[:, None] * self.grid + np.arange(width)
            blocks.append((top * self.grid + left)[:, None] + inside.reshape(-1))
        blocks_BMK = np.stack(blocks, axis=1)
        is_target = np.zeros((len(keys), self.grid**2), bool)
        np.put_along_axis(is_target, blocks_BMK.reshape(len(keys), -1), True, axis=1)
        order_BN = orders(keys.view(np.uint64), self.grid**2, Purpose.REMOVED)
        others_first = np.argsort(np.take_along_axis(is_target, order_BN, axis=1), axis=1, kind="stable")
        seen_BC = np.take_along_axis(order_BN, others_first[:, : self.seen], axis=1)
        return torch.from_numpy(seen_BC), torch.from_numpy(blocks_BMK)

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Rows:
        """As `Objective.prepare`: the teacher's tokens in the blocks, normalised (B, M K, D)."""
        tokens_BND = self.backbone.patch_tokens(self.backbone(views[0][:, 0]).tokens)
        return rows(F.layer_norm(tokens_BND, tokens_BND.shape[2:]), plan[1].flatten(1))

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: the means over the blocks' tokens of Huber's loss, which is linear from 1 on."""
        seen_BC, blocks_BMK, targets = plan
        blocks = blocks_BMK.shape[1]
        tokens_BTD = self.backbone(views[0][:, 0], kept=seen_BC).tokens
        # Each block is predicted by itself: a sequence for each.
        tokens, seen = (each.repeat_interleave(blocks, dim=0) for each in (tokens_BTD, seen_BC))
        predicted = self.predictor(tokens, self.mask, seen, blocks_BMK.flatten(0, 1))
        each = F.smooth_l1_loss(predicted.view(targets.shape), targets.float(), reduction="none")
        return Losses(each.mean(dim=(1, 2)))

    def units(self) -> Sequence[nn.Module]:
        return [*super().units(), *self.predictor.blocks]

    def rules(self, form: Format) -> Sequence[Rule]:
        """As `Objective.rules`: ours, with which a run continues another one's predictor."""
        own = [name for name, _ in self.named_parameters() if not name.startswith("backbone.")]
        return [same(name, name) for name in own] if form == "safetensors" else []

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: norms as the identity, and all else a normal distribution, as its authors'."""
        if name != "mask" and not name.startswith("predictor."):
            return super().initialiser(name)
        if name.endswith("bias"):
            return constant(0.0)
        return constant(1.0) if name.rpartition(".")[0].endswith(("norm", "norm1", "norm2")) else normal(0.02)
