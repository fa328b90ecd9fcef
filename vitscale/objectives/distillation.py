"""Distillation through a token (Touvron et al., 2021, section 4): a model learns from labels and from a teacher.

The teacher is no submodule, so that its weights are not in checkpoints, not updated by the optimizer, not divided by
ZeRO and not exported. Each rank has all of it.

Shape legend: B batch, S side in pixels, K classes.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.models import Outputs
from vitscale.objectives.classification import Classification
from vitscale.objectives.objective import Losses, Plan
from vitscale.recipe import Normalise, Recipe


class Distillation(Classification):
    """The class token's head learns from labels, the distillation token's the classes that the teacher names."""

    _change: tuple[list[float], list[float]] | None = None

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        objective = super().of(recipe, num_classes)
        settings = recipe.objective
        assert isinstance(settings, recipes.Distillation)
        objective._change = change_of_pixels(recipe.data.normalise, settings.teacher.normalise)
        return objective

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Tensor:
        """As `Objective.prepare`: the classes int64 (B,) that the teacher predicts for the same images, mixed too."""
        assert self._taught_by, "the teacher is given before the first step"
        images = views[0][:, 0]
        if self.mixer is not None:
            images = self.mixer.mix_images(images, *plan[1:3])
        if self._change is not None:
            factor, shift = (torch.tensor(each, device=images.device) for each in self._change)
            images = (images.float() * factor + shift).to(images.dtype)
        outputs: Outputs = self._taught_by[0](images)
        assert outputs.logits is not None
        return outputs.logits.argmax(dim=1)

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: the mean of both heads' losses; how often the second head agrees with the teacher."""
        images, partners, plan = self.mixed(views[0][:, 0], labels, plan)
        taught = plan[-1]
        heads = self.seen(images, plan).heads
        assert heads is not None
        by_labels, by_teacher = heads.unbind(dim=1)
        own = self.cross_entropy.per_sample_loss(by_labels, labels, partners)
        others = F.cross_entropy(by_teacher, taught, reduction="none")
        agreement = (by_teacher.detach().argmax(dim=1) == taught).float()
        return Losses((own + others) / 2, {"teacher_agreement": agreement})


def change_of_pixels(ours: Normalise, theirs: Normalise | None) -> tuple[list[float], list[float]] | None:
    """(factor, shift) by channel that turn pixels normalised our way into theirs; None if both are the same."""
    if theirs is None or theirs == ours:
        return None
    factor = [std / other for std, other in zip(ours.std, theirs.std, strict=True)]
    means = zip(ours.mean, theirs.mean, theirs.std, strict=True)
    return factor, [(mean - other) / std for mean, other, std in means]
