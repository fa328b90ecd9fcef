"""Lion (Chen et al., 2023): steps by the sign of a mean gradient, of which nothing else is kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import example_vision
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import Rule, State, Update, decoupled


class SignSteps(torch.optim.Optimizer):
    """Updates each element by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                mean = self.state[weights].setdefault("exp_avg", torch.zeros_like(weights))
                direction = mean.lerp(weights.grad, 1 - group["betas"][0]).sign_()
                weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                mean.lerp_(weights.grad, 1 - group["betas"][1])


class LionRule(Rule[example_vision.Lion]):
    """Algorithm 2 of the paper."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return SignSteps(groups, {"lr": 0.0, "betas": tuple(self.settings.betas), "weight_decay": 0.0})

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        mean, kept = before["exp_avg"], self.settings.betas[1]
        direction = (update.momentum * mean + (1 - update.momentum) * gradient).sign()
        return {MASTER: decoupled(update, before[MASTER], direction), "exp_avg": kept * mean + (1 - kept) * gradient}
