"""The targets and losses of self-distillation: cross-entropies with a teacher's targets, KoLeo, and Gram anchoring.

Targets use all prototypes equally, by the Sinkhorn-Knopp iterations of SwAV and DINOv2 over the global batch. These
couple samples through sums over all rows alone, of one number for each prototype: sums of integers, which have the same
bits in any order, on any number of ranks.

Shape legend: R rows, B batch, V views of an image, G global ones, N patches, D width, K prototypes, C masked patches,
Q groups of I images.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.ground.ranks import Sums

_EPSILON = 1e-8
_ITERATIONS = 3
_LEAST = 2.0**-40  # of the terms that `Sums.total` adds


def potentials(parts: Callable[[], Iterable[Tensor]], sums: Sums) -> Tensor:
    """What `targets` subtracts from the logits of each prototype: fp64 (K,), the same on every rank.

    The published loop divides exp(logits) in turns by the sums of its columns and of its rows. Whatever the columns
    were divided by before, dividing by their sums again leaves exp(logits) / a / (the row's sum), so it is enough to
    carry a (K,) along: each iteration multiplies it by the sums of the columns of softmax(logits - log a).

    Args:
        parts: this rank's logits, divided by the temperature, fp32 (R, K) at a time; asked for four times.
    """
    highest_K: Tensor | None = None
    for logits_RK in parts():
        of_part = logits_RK.amax(dim=0)
        highest_K = of_part if highest_K is None else torch.maximum(highest_K, of_part)
    assert highest_K is not None, "every rank has rows"
    potentials_K = sums.greatest(highest_K).double()
    for iteration in range(_ITERATIONS):
        total_K = sums.total(_terms(parts(), potentials_K, is_first=iteration == 0))
        # Of a prototype that no row is near, nothing may be left: it counts as the smallest number that is not 0.
        potentials_K = potentials_K + total_K.double().clamp(min=_LEAST).log()
    return potentials_K


def _terms(parts: Iterable[Tensor], potentials_K: Tensor, *, is_first: bool) -> Iterator[Tensor]:
    for logits_RK in parts:
        less_RK = _less(logits_RK, potentials_K)
        yield less_RK.exp() if is_first else less_RK.softmax(dim=1)


def targets(logits_RK: Tensor, potentials_K: Tensor) -> Tensor:
    """The probabilities of prototypes that rows are to be given, fp32 (R, K)."""
    return _less(logits_RK, potentials_K).softmax(dim=1)


def _less(logits_RK: Tensor, potentials_K: Tensor) -> Tensor:
    """Logits less potentials, in fp32, but without rounding potentials of 16 and more to 6 digits."""
    rounded_K = potentials_K.float()
    return logits_RK.sub(rounded_K).sub_((potentials_K - rounded_K).float())


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
