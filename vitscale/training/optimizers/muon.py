"""Muon (Jordan et al. 2024): momentum made orthogonal for matrices, AdamW for all else; in timm's form."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitscale.recipe import Muon as Settings
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import LEAST, OF_TERMS, Expected, Rule, State, Update, adam, decoupled
from vitscale.training.optimizers.whole_tensors import Group, Piece, WholeTensorOptimizer, update_means

# Coefficients (a, b, c) of the polynomials a x + b x^3 + c x^5 that take singular values to 1, one for each step
# (modded-nanogpt, 2025).
_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class Muon(WholeTensorOptimizer):
    """Each matrix is whole on one rank while it is made orthogonal; all else is computed where it lies.

    The parameters of a group are all matrices, or none is.
    """

    def __init__(self, groups: Iterable[Group], settings: Settings) -> None:
        betas = (settings.betas[0], settings.betas[1])
        super().__init__(groups, {"momentum": settings.momentum, "betas": betas, "eps": settings.eps})
        self._settings = settings

    def update(self, group: Group, masters: list[Tensor]) -> None:
        """Make one update. For matrices the ranks exchange data twice, 2 bytes an element each time."""
        parts = self.parts(masters)
        are_matrices = any("momentum_buffer" in self._settings.kept(part.name, part.shape) for part in parts)
        for _, piece, state in self.here(parts):
            gradient = piece.of_gradient()
            if are_matrices:
                gradient.copy_(piece.view(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"]))
            else:
                update_means(group, gradient, *(piece.view(state[kind]) for kind in ("exp_avg", "exp_avg_sq")))
        if are_matrices:
            self.on_whole_matrices(parts, Piece.of_gradient, partial(orthogonal, eps=group["eps"]))
        for part, piece, _ in self.here(parts):
            scale = 0.2 * math.sqrt(max(part.shape[0], math.prod(part.shape[1:]))) if are_matrices else 1.0
            weights = piece.view(piece.flat).mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(piece.of_gradient(), alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor, eps: float) -> Tensor:
    """Approximately the nearest matrix with orthogonal rows or columns, bf16 (m, n), by five Newton-Schulz steps.

    On CPUs the steps are in fp32: without instructions for bf16, its products take tens of times as long.
    """
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x.float() if x.is_cpu else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_(min=eps)
    for a, b, c in _COEFFICIENTS:
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


class MuonRule(Rule[Settings]):
    """Its matrices are those that it keeps a momentum of; AdamW's rule is for all else."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Muon(groups, self.settings)

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        if "momentum_buffer" not in before:
            betas = (self.settings.betas[0], self.settings.betas[1])
            direction, kept = adam(betas, self.settings.eps, update, before, gradient)
            return {MASTER: decoupled(update, before[MASTER], direction), **kept}
        mean = self._mean(update, before, gradient)["momentum_buffer"]
        x = self._steps(mean, torch.float64)
        direction = 0.2 * math.sqrt(max(x.shape)) * x.view(mean.shape)
        return {MASTER: decoupled(update, before[MASTER], direction), "momentum_buffer": mean}

    def roundings(self, before: State) -> tuple[torch.dtype, int]:
        """Of 15 products of matrices in bf16, each of which enlarges the errors of the ones before."""
        return (torch.bfloat16, 64) if "momentum_buffer" in before else super().roundings(before)

    def noise(self, update: Update, before: State, gradient: Tensor) -> float:
        """As `Rule.noise`: small singular values, and errors beside them, grow by up to 490 times in five steps."""
        if "momentum_buffer" not in before:
            return 0.0
        mean = self._mean(update, before, gradient)["momentum_buffer"]
        exact, rounded = (self._steps(mean, dtype).double() for dtype in (torch.float64, torch.bfloat16))
        return float((rounded - exact).norm() / exact.norm().clamp(min=LEAST))

    def of_elements(self, update: Update, before: State, gradient: Tensor, after: State) -> Expected:
        """Of a matrix only the size of the change is known."""
        if "momentum_buffer" not in before:
            return self.within(lambda state, slope: self.reference(update, state, slope), before, gradient)
        kept = before[MASTER] * (1 - update.rate * update.decay)
        longest = max(update.shape[0], math.prod(update.shape[1:]))
        most = 0.3 * math.sqrt(longest) * update.rate  # an orthogonal matrix has no element above 1, these reach 1.2
        of_mean = self.within(lambda state, slope: self._mean(update, state, slope), before, gradient)
        return {**of_mean, MASTER: (kept, OF_TERMS * kept.abs() + most + LEAST)}

    def _steps(self, mean: Tensor, dtype: torch.dtype) -> Tensor:
        """The formula, and not `orthogonal`: a mistake there must not widen the limit by which it is found."""
        x = mean.flatten(1) / max(float(mean.norm()), self.settings.eps)
        x = (x.mT if x.shape[0] > x.shape[1] else x).to(dtype)
        for a, b, c in _COEFFICIENTS:
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
        return x.mT if mean.shape[0] > mean[0].numel() else x

    def _mean(self, update: Update, before: State, gradient: Tensor) -> State:
        kept = update.momentum * before["momentum_buffer"]
        return {"momentum_buffer": kept + (1 - update.momentum) * gradient}
