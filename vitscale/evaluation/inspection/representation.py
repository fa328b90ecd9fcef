"""Measures what models represent: filters, positions, the alignment of layers, tokens as colours.

Figure 7 left and centre and Figure 9 of the paper are of the first two.

Shape legend: F filters, h w C their height, width and channels, B images of a minibatch, T tokens, N patches, D width,
k pictures, K components, E elements of a representation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SHOWN_COMPONENTS = 28  # the number of components shown, as in Figure 7
SMALLEST_BATCH = 4  # the number of images that the unbiased estimator needs


class Components(NamedTuple):
    """Principal components of filters, (K, h, w, C), and the share of the variance along each, (K,)."""

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
    components, shares, _ = principal_components(flat, min(SHOWN_COMPONENTS, len(flat) - 1, flat.shape[1]))
    return Components(components.view(-1, *filters.shape[1:]), shares)


def similarity(positions: Tensor) -> Tensor:
    """Cosines between all position embeddings (N, D): (N, N)."""
    unit = F.normalize(positions.detach().double().cpu(), dim=-1)
    return unit @ unit.T


def gram(representation: Tensor) -> Tensor:
    """The inner products of a minibatch's centred representations (B, ...), with a zero diagonal: fp64 (B, B)."""
    rows = representation.flatten(1).float()
    rows = rows - rows.mean(dim=0)
    return (rows @ rows.T).double().cpu().fill_diagonal_(0.0)


def independence(one: Tensor, other: Tensor) -> float:
    """The unbiased estimate of the Hilbert-Schmidt independence criterion from two Gram matrices with zero diagonals.

    Song et al., 2012, equation 5. Whatever the minibatches' size, its mean over them estimates the value over all
    images (Nguyen et al., 2021). Needs 4 images.
    """
    B = len(one)
    ones_one, ones_other = one.sum(dim=0), other.sum(dim=0)
    value = (one * other).sum() + ones_one.sum() * ones_other.sum() / ((B - 1) * (B - 2))
    return float((value - 2 * (ones_one @ ones_other) / (B - 2)) / (B * (B - 3)))


def alignment(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> Tensor:
    """Linear centred kernel alignment between layers, 1 if they are alike: (layers of one, layers of other).

    Given are, for each layer, the Gram matrices of the minibatches; both must be of the same images.
    """

    def mean(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
        return sum(independence(a, b) for a, b in zip(these, those, strict=True))

    own = torch.tensor([mean(layer, layer) for layer in one], dtype=torch.float64)
    of_other = torch.tensor([mean(layer, layer) for layer in other], dtype=torch.float64)
    shared = torch.tensor([[mean(a, b) for b in other] for a in one], dtype=torch.float64)
    return shared / (own[:, None] * of_other).clamp_min(1e-300).sqrt()


def colours(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first three principal components of patch tokens (k, N, D) as red, green and blue in [0, 1], (k, N, 3).

    They are computed over all pictures together, so that a colour means the same in each. Also returns the share of the
    variance along each component, (3,).
    """
    k, N, D = tokens.shape
    flat = tokens.detach().reshape(k * N, D).double().cpu()
    components, shares, mean = principal_components(flat, 3)
    values = (flat - mean) @ components.T
    low, high = values.quantile(0.01, dim=0), values.quantile(0.99, dim=0)
    values = ((values - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return F.pad(values, (0, 3 - values.shape[1])).view(k, N, 3), F.pad(shares, (0, 3 - len(shares)))
