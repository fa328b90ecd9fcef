"""A logistic probe: multinomial regression with an L2 penalty, its strength chosen on a part of the training samples.

Shape legend: N samples, D width, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

STRENGTHS = tuple(10.0**exponent for exponent in np.linspace(-6, 5, 45))
"""C, the inverse of the penalty: the values that DINOv2 chooses among."""

DEVELOPMENT = 0.1
"""Part of the training samples on which C is chosen."""

_STD_FLOOR = 1e-5


@dataclass(frozen=True)
class Probe:
    """Attributes:
    strength: C that was chosen.
    accuracy: on the test samples.
    """

    strength: float
    accuracy: float


@dataclass(frozen=True)
class Solution:
    """Weights (K, D) and biases (K,) in float64, of whitened features."""

    weight: Tensor
    bias: Tensor

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Of samples (N, D), (N,)."""
        return float(((x @ self.weight.T + self.bias).argmax(dim=1) == y).double().mean())


def logistic_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    num_classes: int,
    development: Tensor,
    strengths: Sequence[float] = STRENGTHS,
) -> Probe:
    """Choose C on the samples where `development` (N,) bool is set, then fit all training samples and test.

    Features are whitened by what is fitted. Between equal accuracies the smaller C wins.
    """
    fit_x, held_x = whitened(train_x[~development], train_x[development])
    fit_y, held_y = train_y[~development], train_y[development]
    best, start, chosen = -1.0, None, strengths[0]
    for strength in sorted(strengths):
        start = solve(fit_x, fit_y, num_classes, strength, start)
        accuracy = start.accuracy(held_x, held_y)
        if accuracy > best:
            best, chosen = accuracy, strength
    train_x, test_x = whitened(train_x, test_x)
    return Probe(chosen, solve(train_x, train_y, num_classes, chosen).accuracy(test_x, test_y))


def whitened(train_x: Tensor, other_x: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, by the training samples' mean and standard deviation."""
    train_x, other_x = train_x.double(), other_x.double()
    mean, std = train_x.mean(dim=0), train_x.std(dim=0, correction=0) + _STD_FLOOR
    return (train_x - mean) / std, (other_x - mean) / std


def solve(
    x: Tensor,
    y: Tensor,
    num_classes: int,
    strength: float,
    start: Solution | None = None,
    *,
    tolerance: float = 1e-6,
    most_steps: int = 1000,
) -> Solution:
    """The minimum of C * sum of cross-entropies + |weights|^2 / 2 by L-BFGS; biases are not penalised.

    Args:
        x, y: (N, D) float64, (N,) int64.
        strength: C.
        start: where to begin; by default at zero.
        tolerance: largest gradient, of the loss divided by C * N, at which it ends.
    """
    weight = x.new_zeros(num_classes, x.shape[1]) if start is None else start.weight.clone()
    bias = x.new_zeros(num_classes) if start is None else start.bias.clone()
    weight.requires_grad_()
    bias.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=most_steps,
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
