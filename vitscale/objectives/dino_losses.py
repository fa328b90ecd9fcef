"""The losses of self-distillation: cross-entropies with a teacher's targets, KoLeo, and Gram anchoring.

Shape legend: B batch, V views of an image, G global ones, N patches, D width, K prototypes, C masked patches, Q groups
of I images.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_EPSILON = 1e-8


def class_losses(logits_BVK: Tensor, targets_BGK: Tensor) -> Tensor:
    """DINO's (B,): the mean cross-entropy of each view with the targets of each global view but itself.

    Args:
        logits_BVK: the student's, divided by its temperature, fp32; of the global views first.
        targets_BGK: the teacher's probabilities of the global views, fp32.
    """
    views, seen = logits_BVK.shape[1], targets_BGK.shape[1]
    # Targets sum to 1.
    each_BVG = logits_BVK.logsumexp(dim=2)[:, :, None] - logits_BVK @ targets_BGK.transpose(1, 2)
    with_itself_B = each_BVG[:, :seen].diagonal(dim1=1, dim2=2).sum(dim=1)
    return (each_BVG.sum(dim=(1, 2)) - with_itself_B) / (seen * (views - 1))


def patch_losses(logits_CK: Tensor, targets_CK: Tensor, masks_BGN: Tensor, places_QC: Tensor) -> Tensor:
    """iBOT's (B,): the mean cross-entropy over the masked patches of each global view, and over the views.

    Views without masked patches count as 0, as in DINOv2.

    Args:
        logits_CK: the student's of all masked patches, divided by its temperature, fp32.
        targets_CK: the teacher's probabilities.
        masks_BGN: which patches are masked.
        places_QC: where those are among all of a group of images.
    """
    of_patches = (logits_CK.logsumexp(dim=1) - (logits_CK * targets_CK).sum(dim=1)).view(places_QC.shape)
    placed = of_patches.new_zeros(len(places_QC), masks_BGN.numel() // len(places_QC)).scatter(1, places_QC, of_patches)
    return (placed.view(masks_BGN.shape).sum(dim=2) / masks_BGN.sum(dim=2).clamp(min=1)).mean(dim=1)


def koleo(rows_BGD: Tensor, group: int) -> Tensor:
    """KoLeo (Sablayrolles et al., 2019) of each image (B,), the sum over its global views: minus the logarithm of the
    distance from the nearest of the group's images, of rows of length 1.
    """
    rows = F.normalize(rows_BGD.float(), dim=2, eps=_EPSILON)
    rows_GID = rows.unflatten(0, (-1, group)).transpose(1, 2).flatten(0, 1)  # of each group and view
    with torch.no_grad():
        cosines = rows_GID @ rows_GID.transpose(1, 2)
        cosines.diagonal(dim1=1, dim2=2).fill_(-2)  # less than that of opposite rows
        nearest = F.one_hot(cosines.argmax(dim=2), group).to(rows.dtype)
    # Not by an index: rows that are nearest to several others would have their gradients added in any order.
    distances = F.pairwise_distance(rows_GID, nearest @ rows_GID, eps=_EPSILON)
    of_rows = -(distances + _EPSILON).log()
    return of_rows.view(-1, rows.shape[1], group).sum(dim=1).flatten()


def gram_losses(patches_BGND: Tensor, teachers_BGND: Tensor) -> Tensor:
    """Gram anchoring (Simeoni et al., 2025): the mean square (B,) of how far the cosines of all pairs of patches of a
    view, each with itself as well, are from those of the teacher's patches.
    """
    unit, wanted = (F.normalize(each.float(), dim=3) for each in (patches_BGND, teachers_BGND))
    differences_BGNN = unit @ unit.transpose(2, 3) - wanted @ wanted.transpose(2, 3)
    return differences_BGNN.square().mean(dim=(1, 2, 3))
