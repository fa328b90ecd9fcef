"""Lengths of training, and numbers that change over one."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vitscale.ground.block import Block


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


class Ramp(Course):
    """A number that changes with the step, and where it begins."""

    # `from` is a Python keyword, hence the alias.
    start: Annotated[float, Field(ge=0, alias="from")]
    """the value at the first step"""
