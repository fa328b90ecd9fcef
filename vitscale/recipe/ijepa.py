"""The `objective` block of I-JEPA, and what is known about it without torch."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vitscale.ground.operations import Operation
from vitscale.recipe.headless import WithDecoder
from vitscale.recipe.objectives import Context, forward_only

_Shares = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)]


class IJEPA(WithDecoder):
    """I-JEPA (Assran et al., 2023; arXiv:2301.08243): of some patches, the model predicts what it makes of others.

    The teacher, an average of the model, sees the whole image. The model sees a part of its patches, and a predictor,
    Transformer blocks with the fixed positions of MAE, predicts the teacher's tokens in several blocks of patches.
    """

    implementation: ClassVar[str] = "vitscale.objectives.ijepa:IJEPA"
    own: ClassVar[tuple[str, ...]] = ("mask", "predictor.")
    part: ClassVar[str] = "predictor"

    kind: Literal["ijepa"] = Field(description="chooses this objective")
    blocks: int = Field(4, ge=1, le=64, description="number of blocks that are predicted of each image")
    area: _Shares = Field([0.15, 0.2], description="lowest and highest share of the patches in a block")
    context: float = Field(0.25, gt=0, lt=1)
    """share of the patches that the model sees, rounded: of those outside the blocks, as long as there are any"""
    predictor_width: int = Field(384, ge=4, le=2**17, description="width of the predictor's tokens")
    predictor_depth: int = Field(12, ge=1, le=1024, description="number of the predictor's Transformer blocks")
    predictor_heads: int = Field(12, ge=1, le=1024, description="attention heads per block; must divide its width")

    def _contradictions(self) -> Iterator[str]:
        if self.area[0] > self.area[1]:
            yield f"area {self.area}: expected [low, high] with low at most high"
        yield from super()._contradictions()

    def check_kept(self, context: Context) -> None:
        grid = self.patches(context).grid
        if grid < 2 or not self.kept(context):
            raise ValueError(
                f"objective.context {self.context:g} of {grid**2} patches: expected at least one; use a larger share "
                f"or a larger data.image_size"
            )

    @property
    def prepares(self) -> Literal["average"]:
        return "average"

    def kept(self, context: Context) -> int:
        return round(self.context * self.patches(context).grid ** 2)

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: on the patches that it sees, and the teacher's on all."""
        taught = context.model.operations(context.data.image_size, num_classes)
        return [*super().model_operations(context, num_classes), *forward_only(taught, "teacher")]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the predictor, for blocks of the middle size."""
        predicted = round(sum(self.area) / 2 * self.patches(context).grid ** 2)
        return self.decoder_operations(context, predicted, context.model.representation_width, self.blocks)
