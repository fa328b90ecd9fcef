"""What computes the prediction of rotations."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.data.draws import stratum
from vitscale.models import Initialiser, Model, build_model, constant
from vitscale.objectives import Losses, Objective, Plan
from vitscale.recipe import Recipe

_TURNS = 1000  # the purpose of a draw


class Rotation(Objective):
    """Cross-entropy of the four rotations, told from the representation."""

    def __init__(self, backbone: Model) -> None:
        super().__init__(backbone)
        self.turns = nn.Linear(backbone.shape.width, 4)

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        return cls(build_model(recipe, None))

    def plan(self, keys: np.ndarray, step: int) -> Plan:
        """As `Objective.plan`: quarter turns, (B,) int64."""
        return (torch.from_numpy(stratum(keys, 4, _TURNS)),)

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        images, (turns,) = views[0][:, 0], plan
        rotated = torch.stack([torch.rot90(images, count, dims=(1, 2)) for count in range(4)])
        logits = self.turns(self.backbone(rotated[turns, torch.arange(len(turns))]).pooled).float()
        is_right = (logits.detach().argmax(dim=1) == turns).float()
        return Losses(F.cross_entropy(logits, turns, reduction="none"), {"turn_accuracy": is_right})

    def initialiser(self, name: str) -> Initialiser:
        return constant(0.0) if name.startswith("turns.") else super().initialiser(name)
