"""AdamW (Loshchilov and Hutter, 2019) as torch has it, and LAMB (You et al. 2020) as DeiT-III trains with it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vitscale.recipe import AdamW
from vitscale.recipe import Lamb as Settings
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import OF_CHANGE, OF_TERMS, Expected, Rule, State, Update, adam, decoupled
from vitscale.training.optimizers.whole_tensors import Group, PlacedParameter, WholeTensorOptimizer, update_means


class AdamWRule(Rule[AdamW]):
    """torch's on every device: one definition, no operator to compile. Its weight decay is times the learning rate."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        betas = self.settings.betas
        # Offloaded state is on the CPU, whatever the device: `fused` works on both.
        return torch.optim.AdamW(groups, lr=0.0, betas=(betas[0], betas[1]), eps=self.settings.eps, fused=True)

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        betas = (update.momentum, self.settings.betas[1])
        direction, kept = adam(betas, self.settings.eps, update, before, gradient)
        return {MASTER: decoupled(update, before[MASTER], direction), **kept}


class Lamb(WholeTensorOptimizer):
    """Adam's direction plus weight decay, scaled to the norm of its parameter; without weight decay it is not scaled.

    NVIDIA's and timm's form. Gradients are clipped beforehand, by the recipe's `clip_norm`; timm's LAMB clips itself.
    """

    def __init__(self, groups: Iterable[Group], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})

    def update(self, group: Group, masters: list[Tensor]) -> None:
        """Make one update. The ranks sum two numbers for each parameter."""
        parts = self.parts(masters)
        for _, piece, state in self.here(parts):
            means = (piece.view(state[kind]) for kind in ("exp_avg", "exp_avg_sq"))
            update_means(group, piece.of_gradient(), *means)
        if group["weight_decay"]:
            self._scale(group, parts)
        for _, piece, _ in self.here(parts):
            piece.view(piece.flat).add_(piece.of_gradient(), alpha=-group["lr"])

    def _scale(self, group: Group, parts: list[PlacedParameter]) -> None:
        """Add the weight decay to the directions, and give each the norm of its parameter."""
        squares = torch.zeros(len(parts), 2, dtype=torch.float64, device=self.device)
        for row, part in zip(squares, parts, strict=True):
            if part.piece is not None:
                weights, update = part.piece.view(part.piece.flat), part.piece.of_gradient()
                update.add_(weights, alpha=group["weight_decay"])
                row[0], row[1] = weights.norm(), update.norm()
        weights, updates = self.summed(squares.square_()).sqrt_().unbind(1)
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0).float()
        for ratio, part in zip(ratios, parts, strict=True):
            if part.piece is not None:
                part.piece.of_gradient().mul_(ratio)


class LambRule(Rule[Settings]):
    """In NVIDIA's form, where the direction of what has no weight decay is not scaled."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Lamb(groups, (self.settings.betas[0], self.settings.betas[1]), self.settings.eps)

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        return self._scaled(update, before, gradient, None)

    def _scaled(self, update: Update, before: State, gradient: Tensor, after: State | None) -> State:
        """With the ratio of the norms, or where only a few elements are known, that of the step made."""
        direction, kept = adam((update.momentum, self.settings.betas[1]), self.settings.eps, update, before, gradient)
        direction, weights, ratio = direction + update.decay * before[MASTER], before[MASTER], 1.0
        if update.decay and update.rate and direction.any():
            if after is None:
                ratio = float(weights.norm() / direction.norm()) or 1.0
            else:
                step = weights - after[MASTER]
                ratio = float((step * direction).sum() / (update.rate * direction.square().sum()))
        return {MASTER: weights - update.rate * ratio * direction, **kept}

    def of_elements(self, update: Update, before: State, gradient: Tensor, after: State) -> Expected:
        expected = self.within(lambda state, slope: self._scaled(update, state, slope, after), before, gradient)
        weights, limit = expected[MASTER]
        change = (weights - before[MASTER]).abs()
        # The ratio is that of steps whose weights were rounded.
        off = OF_TERMS * before[MASTER].norm() * change / change.norm().clamp_min(1e-300) + OF_CHANGE * change.max()
        return {**expected, MASTER: (weights, limit + off)}
