"""Contrastive learning: views of one image attract each other, and those of other images in their group repel.

Shape legend: G images and R views in a group, V views of an image, D width.
"""

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale import recipe as recipes
from vitscale.ground.errors import DataError
from vitscale.objectives.joint_embedding import JointEmbedding

if TYPE_CHECKING:
    from vitscale.data.batch import Batch


def contrastive_losses(projected_RD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The supervised contrastive loss (Khosla et al., 2020, equation 2) of each view within its group, in nats.

    With images' numbers as labels, and two views of each, it is NT-Xent (Chen et al., 2020, equation 1).

    Args:
        projected_RD: fp32; only its directions count.
        labels: int64 (R,); views of equal labels attract each other. The loss of one that is alone is 0.
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
    losses = -log_shares.sum(dim=1) / attracts.sum(dim=1).clamp(min=1)
    repelled = cosines_RR.detach().masked_fill(is_alike, 0.0).sum(dim=1) / (~is_alike).sum(dim=1).clamp(min=1)
    return losses, repelled


class Contrastive(JointEmbedding):
    """NT-Xent, or the supervised contrastive loss."""

    shown: ClassVar[tuple[str, ...]] = ("repelled_cosine",)

    settings: recipes.Contrastive

    def check(self, batch: "Batch") -> None:
        if self.settings.loss == "sup_con" and (missing := int((batch.labels < 0).sum())):
            raise DataError(
                f"{missing} of {len(batch.labels)} samples of a batch have no label, and objective.loss: sup_con "
                f"compares by labels; use nt_xent, or data with labels"
            )

    def compare(self, projected_GVD: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """As `JointEmbedding.compare`: means over the views of an image; the mean cosine with what repels, too."""
        images, views = projected_GVD.shape[:2]
        if self.settings.loss == "nt_xent":
            labels = torch.arange(images, device=labels.device)
        rows = projected_GVD.flatten(0, 1)
        compared = contrastive_losses(rows, labels.repeat_interleave(views), self.settings.temperature)
        return tuple(each.view(images, views).mean(dim=1) for each in compared)
