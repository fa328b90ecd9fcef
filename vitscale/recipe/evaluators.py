"""What a model is measured by, as a recipe says it: the base of each block of `evaluation.evaluators`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from vitscale.block import Block


class Evaluator(Block):
    """An evaluator of another package."""

    # `module:class` of the `vitscale.evaluation.Evaluator` that measures.
    implementation: ClassVar[str]

    kind: str = Field(description="the dotted path of its block, such as my_package.Calibration, whose keys stand here")
    name: str = Field(min_length=1, description="what metrics call it")

    def metrics(self) -> Sequence[str]:
        """The names of the figures that it yields, for `selection` to choose by."""
        return ()

    def on_smoke_data(self, train: str, test: str) -> dict[str, Any]:
        """Keys that have it look at the datasets of a smoke run in the place of its own."""
        return {}
