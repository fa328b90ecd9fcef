"""The base of each block of `evaluation.evaluators`: what a recipe says about an evaluator of a model."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from vitscale.ground.block import Block


class Evaluator(Block):
    """An evaluator of another package."""

    # `module:class` of the `vitscale.evaluation.Evaluator` that measures.
    implementation: ClassVar[str]

    kind: str
    """dotted path of its block, such as my_package.Calibration, whose keys are written here"""
    name: str = Field(min_length=1, description="its name in metrics")

    def metrics(self) -> Sequence[str]:
        """The names of the metrics that it yields, which `selection` can choose by."""
        return ()

    def on_smoke_data(self, train: str, test: str) -> dict[str, Any]:
        """The keys that make it use a smoke run's datasets instead of its own."""
        return {}
