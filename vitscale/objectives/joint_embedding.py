"""Objectives that compare projections of all views of the images in a group of the global batch.

Groups are neighbouring slots of the global batch, and a micro-batch is a number of whole groups. Or the global batch is
one group: a first pass without gradients computes all projections, from which each rank derives all losses and their
gradients; the passes that learn carry these to the weights (Gao et al., 2021; arXiv:2101.06983). Either way the loss is
the same on every world and for every micro-batch.

Shape legend: B batch, V views of an image, S side in pixels, G images of a group, D width.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale.ground.ranks import Sums
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.layers import LayerNorm, Linear
from vitscale.objectives.objective import Agreed, Losses, Objective, Plan, Rows
from vitscale.recipe import JointEmbedding as Settings
from vitscale.recipe import Recipe

COLLAPSE_FIGURES = ("spread", "view_cosine")


def collapse_figures(projected_GVD: Tensor) -> tuple[Tensor, ...]:
    """What tells whether projections have collapsed, (G,) each; the second only of several views.

    spread: the standard deviation of the normalised projections (Chen and He, 2021; arXiv:2011.10566, section 4.1), of
        all dimensions together: 0 where all are the same, 1 where they lie in all directions. The mean cosine of any
        two is 1 - spread^2.
    view_cosine: the mean cosine of two views of the image.
    """
    directions = F.normalize(projected_GVD, dim=2)
    images, views = directions.shape[:2]
    spread = directions.var(dim=(0, 1), correction=0).sum().sqrt().expand(images)
    if views == 1:
        return (spread,)
    return spread, (directions.sum(dim=1).square().sum(dim=1) - views) / (views * (views - 1))


class JointEmbedding(Objective):
    """A backbone without a head, and the projection whose outputs are compared.

    Args:
        backbone: a model without a head.
        settings: the recipe's block.
        width: D of the backbone's representation.
    """

    shown: ClassVar[tuple[str, ...]] = ()  # names of the figures that `compare` returns besides losses, and ours follow

    def __init__(self, backbone: Model, settings: Settings, width: int) -> None:
        super().__init__(backbone)
        self.settings, self.group = settings, settings.group
        layers = (Linear(width, settings.hidden), LayerNorm(settings.hidden), nn.ReLU())
        self.projection = nn.Sequential(*layers, Linear(settings.hidden, settings.outputs))

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        """As `Objective.of`; the classes play no part."""
        settings = recipe.objective
        assert isinstance(settings, Settings)
        return cls(build_model(recipe, None), settings, recipe.model.representation_width)

    def compare(self, projected_GVD: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The losses of the samples of one group and the figures that `shown` names, all (G,).

        Args:
            projected_GVD: fp32.
            labels: (G,) int64.
        """
        raise NotImplementedError

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Tensor:
        """As `Objective.prepare`: the projections, fp32 (B, V, D)."""
        if len({kind.shape[2] for kind in views}) == 1:
            images = torch.cat(list(views), dim=1)  # (B, V, S, S, 3)
            pooled = self.backbone(images.flatten(0, 1)).pooled.unflatten(0, images.shape[:2])
        else:
            found = self.backbone([kind.flatten(0, 1) for kind in views])
            kinds = [each.pooled.unflatten(0, kind.shape[:2]) for each, kind in zip(found, views, strict=True)]
            pooled = torch.cat(kinds, dim=1)
        projected: Tensor = self.projection(pooled.flatten(0, 1))
        return projected.float().unflatten(0, pooled.shape[:2])

    def agree(self, rows: Rows, labels: Tensor, sums: Sums, weights: Mapping[str, Tensor]) -> Agreed:
        """As `Objective.agree`: each sample's loss and figures (B,), and the gradient of all losses (B, V, D)."""
        assert isinstance(rows, Tensor)
        whole = sums.rows(rows).detach().requires_grad_()
        compared = self._compared(whole, sums.rows(labels))
        (gradient,) = torch.autograd.grad(compared[0].sum(), whole)
        return Agreed(tuple(sums.own(each.detach()) for each in (*compared, gradient)))

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: each sample's is the mean over its views."""
        projected = self.prepare(views, plan)
        if self.group == "global":
            losses, *figures, gradient = plan
            # The value and the gradient are those of the whole batch.
            towards = (projected * gradient).sum(dim=(1, 2))
            losses = losses + towards - towards.detach()
        else:
            groups = zip(projected.split(self.group), labels.split(self.group), strict=True)
            compared = [self._compared(*each) for each in groups]
            losses, *figures = (torch.cat(column) for column in zip(*compared, strict=True))
        names = [*self.shown, *COLLAPSE_FIGURES][: len(figures)]
        return Losses(losses, {name: figure.detach() for name, figure in zip(names, figures, strict=True)})

    def _compared(self, projected_GVD: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """What `compare` returns, and the figures that tell of collapse."""
        return *self.compare(projected_GVD, labels), *collapse_figures(projected_GVD.detach())

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: dense layers begin as a normal distribution, norms as the identity."""
        if not name.startswith("projection."):
            return super().initialiser(name)
        if name.endswith("bias"):
            return constant(0.0)
        return constant(1.0) if name == "projection.1.weight" else normal(0.02)
