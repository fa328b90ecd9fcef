"""Stochastic gradient descent, torch's or with momentum that is kept in bf16, as the authors fine-tune."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitscale.recipe import SGD
from vitscale.runs.checkpoint import MASTER
from vitscale.training.optimizers.rule import Rule, State, Update

_AT_ONCE = 1 << 24  # elements copied to fp32 at a time


class Bf16MomentumSGD(torch.optim.Optimizer):
    """torch's SGD with `momentum` and `weight_decay`, computed in fp32; the momentum is rounded to bf16, 2 bytes each.

    The weights are updated by the momentum before it is rounded.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; takes no closure."""
        assert closure is None, "a loss is not computed anew"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                tensors = (parameter, parameter.grad, state["momentum_buffer"])
                pieces = (tensor.view(-1).split(_AT_ONCE) for tensor in tensors)
                for weights, gradient, kept in zip(*pieces, strict=True):
                    momentum = kept.float().mul_(group["momentum"]).add_(gradient)
                    momentum.add_(weights, alpha=group["weight_decay"])
                    weights.add_(momentum, alpha=-group["lr"])
                    kept.copy_(momentum)


class SGDRule(Rule[SGD]):
    """Momentum as torch has it: the mean is not scaled by 1 - momentum."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if self.settings.kept_in_bf16:
            return Bf16MomentumSGD(groups, lr=0.0, momentum=self.settings.momentum)
        return torch.optim.SGD(groups, lr=0.0, momentum=self.settings.momentum, fused=True)

    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        weights, step = before[MASTER], gradient + update.decay * before[MASTER]
        if "momentum_buffer" not in before:
            return {MASTER: weights - update.rate * step}
        step = update.momentum * before["momentum_buffer"] + step
        return {MASTER: weights - update.rate * step, "momentum_buffer": step}
