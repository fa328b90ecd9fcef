"""The `objective` block of I-JEPA, and what is known about it without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe.families import ViTShape
from vitscale.recipe.families.vit import axes_by_head
from vitscale.recipe.families.vit_shape import block_operations, norm_parameters
from vitscale.recipe.objectives import Context, Objective

_MLP_RATIO = 4  # of the predictor's width, as in its authors' code
_Shares = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)]


class IJEPA(Objective):
    """I-JEPA (Assran et al., 2023; arXiv:2301.08243): of some patches, the model predicts what it makes of others.

    The teacher, an average of the model, sees the whole image. The model sees a part of its patches, and a predictor,
    Transformer blocks with the fixed positions of MAE, predicts the teacher's tokens in several blocks of patches.
    """

    implementation: ClassVar[str] = "vitscale.objectives.ijepa:IJEPA"
    has_classes: ClassVar[bool] = False
    needs_whole_patches: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = ("mask", "predictor.")

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
        if self.predictor_width % self.predictor_heads or self.predictor_width % 4:
            yield (
                f"predictor_width {self.predictor_width}: expected a multiple of 4 and of predictor_heads, "
                f"{self.predictor_heads}; use for example {4 * self.predictor_heads}"
            )

    def check(self, context: Context) -> None:
        size, patches = context.data.image_size, context.model.patches(context.data.image_size)
        if patches is None:
            raise ValueError("objective.kind: ijepa needs a model that cuts the picture itself into patches")
        for key in ("num_classes", "head_bias"):
            if getattr(context.model, key) is not None:
                raise ValueError(f"model.{key}: with objective.kind: ijepa the model has no head; set it null")
        if context.model.pool_or_default() == "map":
            raise ValueError("model.pool map: with objective.kind: ijepa nothing trains the pooling; use mean or cls")
        if unseen := size % patches.size:
            raise ValueError(
                f"data.image_size {size}: objective.kind: ijepa predicts whole patches, and {size} is no multiple of "
                f"{patches.size}; use {size - unseen + patches.size}"
            )
        if patches.grid < 2 or not self.kept(context):
            raise ValueError(
                f"objective.context {self.context:g} of {patches.grid**2} patches: expected at least one; use a larger "
                f"share or a larger data.image_size"
            )
        try:
            self.model_operations(context, None)
        except ValueError as error:
            raise ValueError(f"objective.kind: ijepa: {error}") from None

    @property
    def prepares(self) -> Literal["average"]:
        """As `Objective.prepares`: the teacher's pass."""
        return "average"

    def kept(self, context: Context) -> int:
        """As `Objective.kept`: what the model sees."""
        return round(self.context * self._grid(context) ** 2)

    def _grid(self, context: Context) -> int:
        patches = context.model.patches(context.data.image_size)
        assert patches is not None, "the objective's own check"
        return patches.grid

    @property
    def predictor_shape(self) -> ViTShape:
        """The dimensions of the predictor's blocks, which are those of its authors."""
        width = self.predictor_width
        return ViTShape(1, width, self.predictor_depth, _MLP_RATIO * width, self.predictor_heads, mlp="exact_gelu")

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As `Objective.axes`: those of the predictor's own heads."""
        return axes_by_head(self.predictor_shape, parameter, shape)

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: on the patches that it sees, and the teacher's on all."""
        size = context.data.image_size
        taught = context.model.operations(size, num_classes)
        return [
            *context.model.operations_of_part(size, num_classes, self.kept(context)),
            *(replace(each, part="teacher", params=0, is_trained=False, recomputed_in=None) for each in taught),
        ]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the predictor, for blocks of the middle size."""
        shape, grid, width = self.predictor_shape, self._grid(context), context.model.representation_width
        tokens, of_all = context.model.num_tokens(context.data.image_size), grid**2
        assert tokens is not None, "a model with patches has tokens"
        seen, predicted = tokens - of_all + self.kept(context), round(sum(self.area) / 2 * of_all)
        block = block_operations(shape, sequences=self.blocks, T=seen + predicted, relative=False)
        operations = [dense("", self.blocks * seen, width, shape.width), parameters("", shape.width)]
        for index in range(shape.depth):
            operations += block_of(block, index, needs_output=False)
        operations.append(parameters("", norm_parameters(shape, shape.width)))
        operations.append(dense("", self.blocks * predicted, shape.width, width))
        return [replace(operation, part="predictor") for operation in operations]

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: with a small predictor."""
        return self.model_copy(update={"predictor_width": 32, "predictor_depth": 1, "predictor_heads": 2})
