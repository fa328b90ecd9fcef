"""Contrastive learning: views of one image attract each other, and those of other images in their group repel.

Groups are neighbouring slots of the global batch, and a micro-batch is a number of whole groups, or the global batch is
one group, whose projections a first pass computes without gradients (Gao et al., 2021; arXiv:2101.06983): the loss is
the same on every world and for every micro-batch.

Shape legend: B batch, V views of an image, S side in pixels, G images and R views in a group, D width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.ground.errors import DataError
from vitscale.models import Initialiser, Model, build_model, constant, normal
from vitscale.models.layers import LayerNorm, Linear
from vitscale.objectives.objective import Losses, Objective, Plan
from vitscale.recipe import Recipe

if TYPE_CHECKING:
    from vitscale.data.batch import Batch


def contrastive_losses(projected_RD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The supervised contrastive loss (Khosla et al., 2020, equation 2) of each view within its group, in nats.

    With images' numbers as labels, and two views of each, it is NT-Xent (Chen et al., 2020, equation 1).

    Args:
        projected_RD: fp32; only its directions count.
        labels: int64 (R,); views of equal labels attract each other. Each has a partner.
        temperature: divisor of the cosines.

    Returns:
        The losses (R,), and the mean cosine of each view with those it repels, (R,) without gradients; 0 for none.
    """
    directions = F.normalize(projected_RD, dim=1)
    cosines_RR = directions @ directions.T
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    is_alike = labels[:, None] == labels
    logits = (cosines_RR / temperature).masked_fill(itself, -torch.inf)
    attracts = is_alike & ~itself
    log_shares = (logits - logits.logsumexp(dim=1, keepdim=True)).masked_fill(~attracts, 0.0)
    losses = -log_shares.sum(dim=1) / attracts.sum(dim=1)
    repelled = cosines_RR.detach().masked_fill(is_alike, 0.0).sum(dim=1) / (~is_alike).sum(dim=1).clamp(min=1)
    return losses, repelled


class Contrastive(Objective):
    """Compares projections of all views within each group.

    Args:
        backbone: a model without a head.
        settings: the recipe's block.
    """

    def __init__(self, backbone: Model, settings: recipes.Contrastive, width: int) -> None:
        super().__init__(backbone)
        self.settings = settings
        self.projection = nn.Sequential(
            Linear(width, settings.hidden),
            LayerNorm(settings.hidden),
            nn.ReLU(),
            Linear(settings.hidden, settings.outputs),
        )

    @classmethod
    def of(cls, recipe: Recipe, num_classes: int) -> Self:
        """As `Objective.of`; the classes play no part."""
        settings = recipe.objective
        assert isinstance(settings, recipes.Contrastive)
        return cls(build_model(recipe, None), settings, recipe.model.representation_width)

    def check(self, batch: "Batch") -> None:
        """As `Objective.check`: samples without a label, where labels say what attracts."""
        if self.settings.loss == "sup_con" and (missing := int((batch.labels < 0).sum())):
            raise DataError(
                f"{missing} of {len(batch.labels)} samples of a batch have no label, and objective.loss: sup_con "
                f"compares by labels; use nt_xent, or data with labels"
            )

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        """As `Objective.prepares`: if the whole global batch is one group."""
        return self.settings.group == "global"

    def _project(self, views: Sequence[Tensor]) -> Tensor:
        """Projections of all views, fp32 (B, V, D)."""
        images = torch.cat(list(views), dim=1)  # (B, V, S, S, 3)
        projected = self.projection(self.backbone(images.flatten(0, 1)).pooled)
        return projected.float().unflatten(0, images.shape[:2])

    def prepare(self, views: Sequence[Tensor], plan: Plan) -> Tensor:
        """As `Objective.prepare`: the projections (B, V, D)."""
        return self._project(views)

    def agree(self, rows: Tensor, labels: Tensor, step: int) -> Plan:
        """As `Objective.agree`: each sample's loss (B,), mean cosine (B,), and its gradient (B, V, D)."""
        rows = rows.detach().requires_grad_()
        losses, repelled = self._compared(rows, labels)
        (gradient,) = torch.autograd.grad(losses.sum(), rows)
        return losses.detach(), repelled, gradient

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: each sample's is the mean over its views; the mean cosine with what repels, too."""
        projected = self._project(views)
        if self.settings.group != "global":
            grouped = projected.unflatten(0, (-1, self.settings.group))
            losses, repelled = zip(
                *(self._compared(*each) for each in zip(grouped, labels.view(grouped.shape[:2]), strict=True)),
                strict=True,
            )
            return Losses(torch.cat(losses), {"repelled_cosine": torch.cat(repelled)})
        *_, losses, repelled, gradient = plan
        # The value is that of the whole batch, and so is the gradient: its product with what leads to the projections.
        towards = (projected * gradient).sum(dim=(1, 2))
        return Losses(losses + towards - towards.detach(), {"repelled_cosine": repelled})

    def _compared(self, projected_GVD: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of the samples of one group, and their mean cosines with what repels them, both (G,)."""
        count = projected_GVD.shape[:2]
        if self.settings.loss == "nt_xent":
            labels = torch.arange(count[0], device=labels.device)
        labels = labels.repeat_interleave(count[1])
        losses, repelled = contrastive_losses(projected_GVD.flatten(0, 1), labels, self.settings.temperature)
        return losses.view(count).mean(dim=1), repelled.view(count).mean(dim=1)

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: the projection's layers begin as a truncated normal would, norms as identity."""
        if not name.startswith("projection."):
            return super().initialiser(name)
        if name.endswith("bias"):
            return constant(0.0)
        return constant(1.0) if name == "projection.1.weight" else normal(0.02)
