"""The `schedule` block of a recipe: how long to train, and what changes with the step; lengths of training."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from vitscale.ground.block import Block, has_default
from vitscale.recipe.optimizers import Optimizer


class Duration(Block):
    """A length of training in exactly one unit: `{steps: n}`, `{epochs: x}` or `{examples: n}`."""

    steps: int | None = Field(None, ge=0, lt=2**53, description="updates of the weights")
    epochs: float | None = Field(None, ge=0, lt=1e9, description="passes over the training data")
    examples: int | None = Field(None, ge=0, lt=2**53, description="training images")

    def _contradictions(self) -> Iterator[str]:
        if sum(value is not None for value in (self.steps, self.epochs, self.examples)) != 1:
            yield "give exactly one of steps, epochs, examples, e.g. {epochs: 7}"

    def describe(self) -> str:
        """The duration in words, for messages."""
        return ", ".join(f"{value:g} {unit}" for unit, value in self if value is not None)

    def to_steps(self, train_samples: int, global_batch: int) -> int:
        """The number of steps of `global_batch` samples; an epoch has train_samples // global_batch of them."""
        if self.steps is not None:
            return self.steps
        if self.examples is not None:
            return self.examples // global_batch
        assert self.epochs is not None
        # The added part of a step makes up for rounding: in floats 0.29 of 100 steps is less than 29.
        return int(self.epochs * (train_samples // global_batch) + 1e-6)


def _is_above_zero(duration: Duration) -> Duration:
    if not any(value for _, value in duration if value is not None):
        raise ValueError(f"{duration.describe()}: expected more than 0")
    return duration


Interval = Annotated[Duration, AfterValidator(_is_above_zero)]
"""A duration above zero."""


class Course(Block):
    """An optimizer setting that changes with the step, from the optimizer's own value to another."""

    to: float = Field(ge=0, description="the final value, which is then kept")
    over: Interval | None = None
    """length of the change, from the first step on; default: the whole run"""
    shape: Literal["linear", "cosine"] = "cosine"
    """shape of the change; cosine begins and ends slowly"""


_OWNERS = {
    "end_lr": ("linear",),
    "min_lr": ("cosine",),
    "boundaries": ("stairs",),
    "factor": ("stairs",),
    "cooldown": ("wsd", "rsqrt"),
    "cooldown_shape": ("wsd",),
    "timescale": ("rsqrt",),
    "cycle": ("restarts",),
    "cycle_factor": ("restarts",),
    "restart_factor": ("restarts",),
}
"""Field of a schedule -> the kinds of decay that it belongs to."""
_NEEDED = {"stairs": "boundaries", "wsd": "cooldown", "restarts": "cycle"}
"""Kind of decay -> the field that it requires."""


class Schedule(Block):
    """How long to train, and the learning rate over the steps, as in the authors' code."""

    _reports_all: ClassVar[bool] = True
    _later_keys: ClassVar[tuple[str, ...]] = ("min_lr",)

    duration: Interval = Field(description="how long to train")
    warmup: Duration = Field(Duration(steps=0), description="the learning rate rises from 0 to optimizer.lr")
    decay: Literal["linear", "cosine", "stairs", "constant", "wsd", "rsqrt", "restarts"] = "linear"
    """after the warmup: linear: to end_lr; cosine: to min_lr; stairs: by factor at each of boundaries; constant:
    unchanged; wsd: unchanged until the cooldown (warmup, stable, decay); rsqrt: by 1 / sqrt(1 + t / timescale) after t
    steps, as in big_vision; restarts: a cosine to 0 that restarts from the top after each cycle (SGDR)"""
    end_lr: float = Field(1e-5, ge=0, description="final rate of decay: linear; no effect on the others")
    min_lr: float = Field(0.0, ge=0, description="final rate of decay: cosine; no effect on the others")
    boundaries: list[Duration] = Field([], description="times after which decay: stairs multiplies the rate by factor")
    factor: float = Field(0.1, gt=0, lt=1, description="for decay: stairs; no effect on the others")
    cooldown: Duration = Field(Duration(steps=0), description="for decay: wsd and rsqrt: length of the final fall to 0")
    cooldown_shape: Literal["linear", "1-sqrt"] = "linear"
    """for decay: wsd: after a share x of the cooldown, the rate is multiplied by 1 - x or by 1 - sqrt(x)"""
    timescale: Interval = Field(Duration(steps=10_000), description="for decay: rsqrt")
    cycle: Interval | None = None
    """for decay: restarts: length of the first cycle, from the end of the warmup"""
    cycle_factor: float = Field(1.0, ge=1, le=1e6)
    """for decay: restarts: length of each cycle relative to the one before"""
    restart_factor: float = Field(1.0, gt=0, le=1)
    """for decay: restarts: top rate of each cycle relative to the one before"""
    weight_decay: Course | None = None
    """changes optimizer.weight_decay, and that of its groups by the same factor"""
    momentum: Course | None = Field(None, description="changes optimizer.momentum, or the first of optimizer.betas")

    def _contradictions(self) -> Iterator[str]:
        for key, owners in _OWNERS.items():
            is_set = not has_default(self, key)
            if is_set and self.decay not in owners:
                yield f"{key} belongs to decay: {' or '.join(owners)}, and decay is {self.decay}"
            if not is_set and _NEEDED.get(self.decay) == key:
                yield f"decay: {self.decay} needs {key}"
        if self.momentum is not None and not 0 < self.momentum.to < 1:
            yield f"momentum.to {self.momentum.to:g}: expected a number above 0 and below 1"

    def check_optimizer(self, optimizer: Optimizer) -> Iterator[str]:
        """Yield a line for each setting of the schedule that does not fit the optimizer."""
        if self.min_lr > optimizer.lr:
            yield f"schedule.min_lr {self.min_lr:g}: expected at most optimizer.lr, {optimizer.lr:g}"
        if self.weight_decay is not None and optimizer.weight_decay == 0:
            yield "schedule.weight_decay changes optimizer.weight_decay by a factor, and that is 0"
        if self.momentum is not None and optimizer.first_momentum == 0:
            yield f"schedule.momentum: optimizer {optimizer.name} has none at the beginning"
