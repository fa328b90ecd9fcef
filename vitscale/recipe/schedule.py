"""The `schedule` block of a recipe: how long to train, and what changes with the step."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from vitscale.ground.block import Block, has_default
from vitscale.recipe.durations import Course, Duration, Interval
from vitscale.recipe.optimizers import Optimizer

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
