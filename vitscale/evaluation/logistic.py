"""A logistic probe: multinomial regression with an L2 penalty whose strength is chosen on part of the training samples.

Shape legend: N samples, D width, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

STRENGTHS = tuple(10.0**exponent for exponent in np.linspace(-6, 5, 45))
"""C, the inverse of the penalty: the values among which DINOv2 chooses."""

DEVELOPMENT = 0.1
"""The share of the training samples on which C is chosen."""

_STD_FLOOR = 1e-5


@dataclass(frozen=True)
class Probe:
    """The result of a logistic probe.

    Attributes:
        strength: the chosen C.
        accuracy: the accuracy on the test samples, a fraction.
    """

    strength: float
    accuracy: float


@dataclass(frozen=True)
class Solution:
    """Weights (K, D) and biases (K,) for whitened features, in float64."""

    weight: Tensor
    bias: Tensor

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """The accuracy on whitened features (N, D) and classes (N,), a fraction."""
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
    """Choose C on the training samples where `development`, bool (N,), is True, then fit all of them and test.

    Features are whitened by the mean and standard deviation of the samples that are fitted. Between equal accuracies
    the smaller C wins.

    Args:
        train_x, test_x: features, (N, D).
        train_y, test_y: classes in [0, num_classes), int64 (N,).
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
    """Both whitened by the training samples' mean and standard deviation, in float64."""
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
    """Minimise C * sum of cross-entropies + |weights|^2 / 2 by L-BFGS; biases are not penalised.

    Args:
        x, y: whitened features, float64 (N, D), and classes, int64 (N,).
        num_classes: K.
        strength: C.
        start: the initial values; zero by default.
        tolerance: ends once no element of the gradient of the loss divided by C * N is larger.
        most_steps: the largest number of iterations.
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
