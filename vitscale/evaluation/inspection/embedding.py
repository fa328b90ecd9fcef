"""What the first layer has learned: its filters, and the similarity of positions (Figure 7 left and centre, Figure 9).

Shape legend: F filters, h w C their height, width and channels, N patches, D width, K components.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SHOWN_COMPONENTS = 28
"""The number of components shown, as in Figure 7."""


class Components(NamedTuple):
    """Principal components of filters.

    Attributes:
        filters: the components, each of norm 1, its element of largest magnitude positive, (K, h, w, C).
        shares: the share of the filters' variance along each, (K,).
    """

    filters: Tensor
    shares: Tensor


def principal_components(rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Principal components of vectors (R, E): (K, E) of norm 1, their shares of the variance (K,), and the mean (E,).

    Signs are chosen so that each component's element of largest magnitude is positive. K is at most `count`, R and E.
    Computed in fp64.
    """
    rows = rows.double()
    mean = rows.mean(dim=0)
    _, values, components = torch.linalg.svd(rows - mean, full_matrices=False)
    variances = values.square()
    components, shares = components[:count], (variances / variances.sum().clamp_min(1e-300))[:count]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return components * largest.sign(), shares, mean


def filter_components(filters: Tensor) -> Components:
    """The first 28 principal components of filters (F, h, w, C), or as many as there are."""
    flat = filters.detach().float().cpu().flatten(1)
    count = min(SHOWN_COMPONENTS, len(flat) - 1, flat.shape[1])
    components, shares, _ = principal_components(flat, count)
    return Components(components.view(-1, *filters.shape[1:]), shares)


def similarity(positions: Tensor) -> Tensor:
    """Cosines between all position embeddings (N, D): (N, N)."""
    unit = torch.nn.functional.normalize(positions.detach().double().cpu(), dim=-1)
    return unit @ unit.T
