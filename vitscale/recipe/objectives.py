"""What is learned, as a recipe says it: one block a kind of objective, told apart by `kind`.

A block holds what is known without torch; `implementation` names the module that computes it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from vitscale.block import Block
from vitscale.operations import Operation

if TYPE_CHECKING:
    from vitscale.recipe.schema import Recipe

DEFAULT_KIND = "classification"


class Objective(Block):
    """The base of every `objective` block; its keys are the fields of one kind.

    Attributes:
        implementation: `module:class` of the `vitscale.objectives.Objective` that computes it.
        has_classes: whether the model has an output for each class of the training data.
        own: which parameters are the objective's, and no part of the model that is exported or begun with.
    """

    implementation: ClassVar[str]
    has_classes: ClassVar[bool]
    own: ClassVar[tuple[str, ...]] = ()

    kind: str = Field(description="chooses this objective")

    def check(self, recipe: "Recipe") -> None:
        """Raise `ValueError` where the rest of the recipe does not go with this objective."""

    def operations(self, recipe: "Recipe") -> Sequence[Operation]:
        """What one image costs beside the model: heads, decoders, and their parameters."""
        return ()


class Classification(Objective):
    """Cross-entropy over the classes; `on` and `off` are the target values of the true and the other classes."""

    implementation: ClassVar[str] = "vitscale.objectives.classification:Classification"
    has_classes: ClassVar[bool] = True

    kind: Literal["classification"] = Field("classification", description="chooses this objective")
    loss: Literal["sigmoid", "softmax"] = Field(
        "sigmoid",
        description="sigmoid: a yes or no for each class, as the paper pre-trains; softmax: one class an image",
    )
    on: float = Field(1.0, ge=0, le=1, description="target of the true class")
    off: float = Field(0.0, ge=0, le=1, description="target of the others; above 0 with on below 1: label smoothing")

    @model_validator(mode="after")
    def _order(self) -> "Classification":
        if self.on <= self.off:
            raise ValueError(f"on ({self.on}) must be greater than off ({self.off})")
        return self


def with_kind(objective: Any) -> Any:
    """Plain data of an `objective` block; one that names no kind means classification."""
    return {"kind": DEFAULT_KIND} | objective if isinstance(objective, dict) else objective
