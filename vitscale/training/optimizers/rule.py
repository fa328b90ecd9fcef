"""The contract of an optimizer: how it is built, and what an update must be, for those who check it.

What must be is written plainly from the optimizer's paper, in double precision; audits and proofs compare with it what
was done, in fp32 and divided among ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitscale.ground import extensions
from vitscale.recipe import Optimizer

# Tolerances relative to the terms of a sum, and to the change: fp32 rounds by 2^-24; 1 - 0.999 in fp32 is off by 2^-14.
OF_TERMS, OF_CHANGE, LEAST = 2.0**-21, 2.0**-12, 1e-36
OF_BF16 = 2.0**-7  # relative to what is kept in bf16, and computed there

State = Mapping[str, Tensor]  # kind, as in checkpoints, `MASTER` for the weights -> float64
Expected = dict[str, tuple[Tensor, Tensor]]  # kind -> the value that it should have, and by how much it may differ
_Settings = TypeVar("_Settings", bound=Optimizer)


class Update(NamedTuple):
    """How one parameter is updated this time."""

    shape: tuple[int, ...]  # of the whole parameter, as the optimizer sees it
    number: int  # of this update, from 1
    rate: float  # the learning rate now
    decay: float  # the weight decay now
    momentum: float


class Rule(ABC, Generic[_Settings]):
    """An optimizer, by its block of a recipe."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer that trains.

        It keeps `settings.kept` of each parameter under the same names, and takes `lr`, `weight_decay` and the momentum
        from its groups at each step: `momentum`, or the first of `betas`. `updates` is the update's number, from 1.

        Args:
            groups: dicts with `params` and `weight_decay`. The learning rate is 0 at first: DeepSpeed has state created
                by a step with zero gradients.
        """

    @abstractmethod
    def reference(self, update: Update, before: State, gradient: Tensor) -> State:
        """What the state of a whole parameter must be after an update, in double precision.

        Where no element depends on another one, also that of a few elements.
        """

    def roundings(self, before: State) -> tuple[torch.dtype, int]:
        """The number format in which the direction of such a parameter is computed, and the roundings on the way."""
        return torch.float32, 16

    def noise(self, update: Update, before: State, gradient: Tensor) -> float:
        """How far the paper's formula in that format is from `reference`, relative to the direction, where it enlarges
        roundings by as much as the values decide; 0 where it does not.
        """
        return 0.0

    def of_elements(self, update: Update, before: State, gradient: Tensor, after: State) -> Expected:
        """What a few elements must be after an update, and by how much they may be off; an audit compares them.

        Here from `reference`; nothing for an optimizer that needs whole tensors, unless `after`, what was found, tells
        what they would.
        """
        if self.settings.needs_whole_tensors:
            return {}
        return self.within(lambda state, slope: self.reference(update, state, slope), before, gradient)

    def within(self, rule: Callable[[State, Tensor], State], before: State, gradient: Tensor) -> Expected:
        """What a rule for single elements makes of (state, gradient), and how far rounding may take it from that."""
        exact = rule(before, gradient)
        inputs = {**before, "": gradient}
        moved = {kind: torch.zeros_like(gradient) for kind in exact}
        for name, values in inputs.items():
            rounded = {**inputs, name: values * (1 + OF_TERMS)}
            other = rule(rounded, rounded.pop(""))
            for kind, value in exact.items():
                moved[kind] += (other[kind] - value).abs()
        rough = {kind: OF_BF16 / OF_TERMS if kind in self.settings.kept_in_bf16 else 1.0 for kind in exact}
        return {
            kind: (
                value,
                # What was computed is rounded in any case, also where rounding the inputs changes nothing.
                rough[kind] * (moved[kind] + OF_TERMS * torch.maximum(value.abs(), before[kind].abs()))
                + OF_CHANGE * (value - before[kind]).abs()
                + LEAST,
            )
            for kind, value in exact.items()
        }


def rule_of(settings: Optimizer) -> Rule[Any]:
    """The rule of an `optimizer` block. Raises `RecipeError` if that of another package cannot be had."""
    rule: type[Rule[Any]] = extensions.implementation(settings.implementation, Rule)  # type: ignore[type-abstract]
    return rule(settings)


def decoupled(update: Update, weights: Tensor, direction: Tensor) -> Tensor:
    """AdamW's way: the weight decay, times the learning rate, is subtracted from the weight itself."""
    return weights * (1 - update.rate * update.decay) - update.rate * direction


def adam(
    betas: tuple[float, float], eps: float, update: Update, before: State, gradient: Tensor
) -> tuple[Tensor, State]:
    """The direction and both means (Kingma and Ba, 2015, algorithm 1)."""
    mean = betas[0] * before["exp_avg"] + (1 - betas[0]) * gradient
    square = betas[1] * before["exp_avg_sq"] + (1 - betas[1]) * gradient**2
    root = (square / (1 - betas[1] ** update.number)).sqrt() + eps
    return mean / (1 - betas[0] ** update.number) / root, {"exp_avg": mean, "exp_avg_sq": square}
