"""Classifiers on a frozen representation: nearest neighbours, as DINO measures (Caron et al. 2021), and logistic.

Shape legend: N training samples, M test samples, D width, K classes. Features are (N, D) and (M, D), classes in [0, K)
int64 (N,) and (M,).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = (10, 20, 100, 200)
TEMPERATURE = 0.07
STRENGTHS = tuple(10.0**exponent for exponent in np.linspace(-6, 5, 45))
"""C, the inverse of the L2 penalty of logistic regression: the values among which DINOv2 chooses."""
DEVELOPMENT = 0.1  # the share of the training samples on which C is chosen

_CHUNK = 1024
_STD_FLOOR = 1e-5


class Splits(NamedTuple):
    """What a classifier learns from and is tested on: features, their classes, and K."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int


def neighbour_accuracies(splits: Splits, numbers: Sequence[int] = NEIGHBOURS) -> dict[int, float]:
    """k -> test accuracy (a fraction) with k neighbours; `numbers` larger than N are left out.

    The k training samples with the highest cosine similarity vote for their classes with exp(similarity / 0.07).
    """
    train_x, train_y, test_x, test_y, num_classes = splits
    counts = [k for k in sorted(numbers) if k <= len(train_x)]
    if not counts:
        return {}
    known, right = F.normalize(train_x.float(), dim=1), dict.fromkeys(counts, 0)
    for rows, labels in zip(test_x.split(_CHUNK), test_y.split(_CHUNK), strict=True):
        similarity, nearest = (F.normalize(rows.float(), dim=1) @ known.T).topk(counts[-1], dim=1)
        weights, voted = (similarity / TEMPERATURE).double().exp(), train_y[nearest]
        for k in counts:
            votes = weights.new_zeros(len(rows), num_classes).scatter_add_(1, voted[:, :k], weights[:, :k])
            right[k] += int((votes.argmax(dim=1) == labels).sum())
    return {k: count / len(test_x) for k, count in right.items()}


class Solution(NamedTuple):
    """Weights (K, D) and biases (K,) for whitened features, in float64."""

    weight: Tensor
    bias: Tensor

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """The accuracy on whitened features (N, D) and classes (N,), a fraction."""
        return float(((x @ self.weight.T + self.bias).argmax(dim=1) == y).double().mean())


def logistic_probe(splits: Splits, development: Tensor, strengths: Sequence[float] = STRENGTHS) -> tuple[float, float]:
    """Choose C on the training samples where `development`, bool (N,), is True, then fit all of them and test.

    Features are whitened by the mean and standard deviation of the samples that are fitted. Between equal accuracies
    the smaller C wins. Returns it and the test accuracy (a fraction).
    """
    train_x, train_y, test_x, test_y, num_classes = splits
    fit_x, held_x = whitened(train_x[~development], train_x[development])
    fit_y, held_y = train_y[~development], train_y[development]
    best, start, chosen = -1.0, None, strengths[0]
    for strength in sorted(strengths):
        start = solve(fit_x, fit_y, num_classes, strength, start)
        accuracy = start.accuracy(held_x, held_y)
        if accuracy > best:
            best, chosen = accuracy, strength
    train_x, test_x = whitened(train_x, test_x)
    return chosen, solve(train_x, train_y, num_classes, chosen).accuracy(test_x, test_y)


def whitened(train_x: Tensor, other_x: Tensor) -> tuple[Tensor, Tensor]:
    """Both whitened by the training samples' mean and standard deviation, in float64."""
    train_x, other_x = train_x.double(), other_x.double()
    mean, std = statistics(train_x)
    return (train_x - mean) / std, (other_x - mean) / std


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of features, float64 (N, D) -> (D,), (D,), the latter above zero."""
    return x.mean(dim=0), x.std(dim=0, correction=0) + _STD_FLOOR


def solve(
    x: Tensor, y: Tensor, num_classes: int, strength: float, start: Solution | None = None, *, tolerance: float = 1e-6
) -> Solution:
    """Minimise C * sum of cross-entropies + |weights|^2 / 2 by L-BFGS; biases are not penalised.

    Args:
        x, y: whitened features, float64 (N, D), and classes, int64 (N,).
        strength: C.
        start: the initial values; zero by default.
        tolerance: ends once no element of the gradient of the loss divided by C * N is larger.
    """
    weight = x.new_zeros(num_classes, x.shape[1]) if start is None else start.weight.clone()
    bias = x.new_zeros(num_classes) if start is None else start.bias.clone()
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=1000,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight.T + bias, y) + weight.square().sum() / (2 * strength * len(x))
        value.backward()
        return value

    optimizer.step(loss)
    return Solution(weight.detach(), bias.detach())
