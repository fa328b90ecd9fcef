"""The `objective` block of distillation through a token, and what is known about it without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.block import Block
from vitscale.ground.operations import Operation
from vitscale.ground.storage import is_url
from vitscale.recipe.data import Normalise
from vitscale.recipe.families import ModelBlock
from vitscale.recipe.objectives import Classification, Context


class Teacher(Block):
    """The teacher model: never updated, and not part of checkpoints or exports."""

    # `from` is a Python keyword, hence the alias.
    source: Annotated[str | None, Field(alias="from", min_length=1)] = None
    """its weights, with their head: a run's directory, the folder of one checkpoint, or weights in any format that
    `vitscale export` reads; default: initial values, for trials such as smoke forms"""
    step: int | None = Field(None, ge=1, lt=2**53, description="step of the run's checkpoint; default: its newest")
    model: ModelBlock = Field(description="its architecture, as `model`")
    normalise: Normalise | None = None
    """normalisation of its input; default: as data.normalise, which is that of the model itself"""

    def contradictions(self) -> Iterator[str]:
        if self.source is not None and is_url(self.source):
            yield f"from {self.source!r}: expected a path; fetch the weights first"
        if self.step is not None and self.source is None:
            yield "step is of the run that from names, and there is no from"


class Distillation(Classification):
    """Classification, plus a teacher: the distillation token's head learns the teacher's most probable class.

    The loss is the mean of the class token's loss, on labels, and of the cross-entropy of the other head (Touvron et
    al., 2021; hard-label distillation). The teacher sees the same pixels, mixed too.
    """

    implementation: ClassVar[str] = "vitscale.objectives.distillation:Distillation"

    kind: Literal["distillation"] = Field(description="chooses this objective")  # type: ignore[assignment]
    loss: Literal["softmax"] = "softmax"
    """loss of the class token's head; the other head's is also softmax"""
    teacher: Teacher

    def check(self, context: Context) -> None:
        super().check(context)
        shape = context.model.shape()
        if not getattr(shape, "distilled", False):
            raise ValueError(
                "objective.kind: distillation needs a model with a distillation token: set model.distilled true"
            )
        try:
            self.teacher.model.check_image_size(context.data.image_size)
        except ValueError as error:
            raise ValueError(
                f"objective.teacher.model and data.image_size {context.data.image_size}: {error}"
            ) from None

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`, and the teacher's forward pass, whose parameters are not the model's."""
        of_teacher = self.teacher.model.operations(context.data.image_size, num_classes)
        taught = [replace(each, part="teacher", params=0, is_trained=False, recomputed_in=None) for each in of_teacher]
        return [*super().model_operations(context, num_classes), *taught]

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: with a small teacher that has initial weights."""
        small, _ = self.teacher.model.small()
        block = self.teacher.model
        small_model = type(block).model_validate(block.model_dump(by_alias=True) | small | {"num_classes": None})
        return self.model_copy(update={"teacher": Teacher(model=small_model, normalise=self.teacher.normalise)})
