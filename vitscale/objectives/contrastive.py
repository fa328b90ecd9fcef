"""Contrastive learning: views of one image attract each other, and those of other images in their group repel.

Groups are neighbouring slots of the global batch, and a micro-batch is a number of whole groups: the loss is the same
on every world and for every micro-batch.

Shape legend: B batch, V views of an image, S side in pixels, G groups, R views in a group, D width.
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


def contrastive_losses(projected_GRD: Tensor, labels_GR: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The supervised contrastive loss (Khosla et al., 2020, equation 2) of each view within its group, in nats.

    With images' numbers as labels, and two views of each, it is NT-Xent (Chen et al., 2020, equation 1).

    Args:
        projected_GRD: fp32; only its directions count.
        labels_GR: int64; views of equal labels attract each other. Each has a partner.
        temperature: divisor of the cosines.

    Returns:
        The losses (G, R), and the mean cosine of each view with those it repels, (G, R) without gradients; 0 for none.
    """
    directions = F.normalize(projected_GRD, dim=2)
    cosines_GRR = directions @ directions.transpose(1, 2)
    itself = torch.eye(labels_GR.shape[1], dtype=torch.bool, device=labels_GR.device)
    is_alike = labels_GR[:, :, None] == labels_GR[:, None, :]
    logits = (cosines_GRR / temperature).masked_fill(itself, -torch.inf)
    attracts = is_alike & ~itself
    log_shares = (logits - logits.logsumexp(dim=2, keepdim=True)).masked_fill(~attracts, 0.0)
    losses = -log_shares.sum(dim=2) / attracts.sum(dim=2)
    repelled = cosines_GRR.detach().masked_fill(is_alike, 0.0).sum(dim=2) / (~is_alike).sum(dim=2).clamp(min=1)
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

    def losses(self, views: Sequence[Tensor], labels: Tensor, plan: Plan) -> Losses:
        """As `Objective.losses`: each sample's is the mean over its views; the mean cosine with what repels, too."""
        images = torch.cat(list(views), dim=1)  # (B, V, S, S, 3)
        size, count = images.shape[:2]
        projected = self.projection(self.backbone(images.flatten(0, 1)).pooled)
        group = self.settings.group
        if self.settings.loss == "nt_xent":
            labels = torch.arange(size, device=images.device)
        of_views = labels[:, None].expand(-1, count).reshape(-1, group * count)
        found, repelled = contrastive_losses(
            projected.float().unflatten(0, of_views.shape), of_views, self.settings.temperature
        )
        return Losses(
            found.reshape(size, count).mean(dim=1), {"repelled_cosine": repelled.reshape(size, count).mean(dim=1)}
        )

    def initialiser(self, name: str) -> Initialiser:
        """As `Objective.initialiser`: the projection's layers begin as a truncated normal would, norms as identity."""
        if not name.startswith("projection."):
            return super().initialiser(name)
        if name.endswith("bias"):
            return constant(0.0)
        return constant(1.0) if name == "projection.1.weight" else normal(0.02)
