"""Targets that use all prototypes equally: the Sinkhorn-Knopp iterations of SwAV and DINOv2, over the global batch.

The iterations couple samples through sums over all rows alone, of one number for each prototype. These are sums of
integers, so they have the same bits in any order, on any number of ranks.

Shape legend: R rows, K prototypes.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from vitscale.ground.ranks import Sums

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
