"""The `objective` blocks of which a decoder predicts what the model does not see, MAE and I-JEPA, without torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.errors import turned
from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe.families import ViTShape
from vitscale.recipe.families.vit import axes_by_head
from vitscale.recipe.families.vit_shape import block_operations, norm_parameters
from vitscale.recipe.headless import Headless
from vitscale.recipe.objectives import Context, forward_only
from vitscale.recipe.shares import by_largest_remainder

_CHANNELS = 3
_MLP_RATIO = 4  # of a decoder's width, as in the code of MAE and of I-JEPA
_Shares = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=2, max_length=2)]


class WithDecoder(Headless):
    """The base of objectives whose model sees a part of the patches, and a decoder beside it predicts others."""

    needs_whole_patches: ClassVar[bool] = True
    part: ClassVar[str]  # the decoder's name, with which its keys begin: `part`_width, _depth and _heads

    def _contradictions(self) -> Iterator[str]:
        width, heads, unit = self.decoder_shape.width, self.decoder_shape.num_heads, math.lcm(4, self._of_part("heads"))
        if width % unit:
            yield (
                f"{self.part}_width {width}: expected a multiple of 4, for sines and cosines by row and by column, and "
                f"of {self.part}_heads, {heads}; use for example {max(width // unit, 1) * unit}"
            )

    def check(self, context: Context) -> None:
        self.patches(context)
        super().check(context)
        if context.model.pool_or_default() == "map":
            raise ValueError(f"model.pool map: with objective.kind: {self.kind} nothing trains it; use cls or mean")
        self.check_kept(context)
        with turned(f"objective.kind: {self.kind}", ValueError, ValueError):
            self.model_operations(context, None)

    def check_kept(self, context: Context) -> None:
        """Raise `ValueError` if the model would see no patches, or there would be none to predict."""
        raise NotImplementedError

    def _of_part(self, key: str) -> int:
        value: int = getattr(self, f"{self.part}_{key}")
        return value

    @property
    def decoder_shape(self) -> ViTShape:
        """The dimensions of the decoder's blocks, which are those of its authors."""
        width, depth, heads = (self._of_part(key) for key in ("width", "depth", "heads"))
        return ViTShape(1, width, depth, _MLP_RATIO * width, heads, mlp="exact_gelu")

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return axes_by_head(self.decoder_shape, parameter, shape)

    def kept(self, context: Context) -> int:
        raise NotImplementedError

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: only on the patches that the model sees."""
        return context.model.operations_of_part(context.data.image_size, num_classes, self.kept(context))

    def decoder_operations(self, context: Context, predicted: int, outputs: int, sequences: int = 1) -> list[Operation]:
        """The decoder's operations on one image: it predicts so many patches in each of its sequences."""
        patches, shape = self.patches(context), self.decoder_shape
        tokens = context.model.num_tokens(context.data.image_size)
        assert tokens is not None, "a model with patches has tokens"
        seen = tokens - patches.grid**2 + self.kept(context)
        block = block_operations(shape, sequences=sequences, T=seen + predicted, relative=False)
        operations = [dense("", sequences * seen, patches.width, shape.width), parameters("", shape.width)]
        for index in range(shape.depth):
            operations += block_of(block, index, needs_output=False)
        operations.append(parameters("", norm_parameters(shape, shape.width)))
        operations.append(dense("", sequences * predicted, shape.width, outputs))
        return [replace(operation, part=self.part) for operation in operations]

    def smoke_form(self) -> Self:
        small = {"width": 32, "depth": 1, "heads": 2}
        return self.model_copy(update={f"{self.part}_{key}": value for key, value in small.items()})


class MAE(WithDecoder):
    """Masked autoencoder (He et al., 2022): a small decoder predicts the pixels of patches that the model never sees.

    The model sees the other patches alone. The decoder, Transformer blocks with the fixed positions of MAE, sees what
    the model makes of them, and a learned [mask] embedding for each removed patch. Labels are not used, and the model
    has no head.
    """

    implementation: ClassVar[str] = "vitscale.objectives.mae:MaskedAutoencoder"
    own: ClassVar[tuple[str, ...]] = ("mask", "decoder.")
    part: ClassVar[str] = "decoder"

    kind: Literal["mae"] = Field(description="chooses this objective")
    removed: float = Field(0.75, gt=0, lt=1, description="share of an image's patches that is removed, rounded")
    decoder_width: int = Field(512, ge=4, le=2**17, description="width of the decoder's tokens")
    decoder_depth: int = Field(8, ge=1, le=1024, description="number of the decoder's Transformer blocks")
    decoder_heads: int = Field(16, ge=1, le=1024, description="attention heads per block; must divide decoder_width")
    norm_pix: bool = True
    """predict each patch's pixels less their mean, divided by their standard deviation; false: the pixels themselves"""

    def check_kept(self, context: Context) -> None:
        number, kept = self.patches(context).grid ** 2, self.kept(context)
        if not 0 < kept < number:
            raise ValueError(
                f"objective.removed {self.removed:g} of {number} patches keeps {kept}; at least one has to be kept and "
                f"one removed"
                + (f": 0.5 keeps {(number + 1) // 2}" if number > 1 else "; use a larger data.image_size")
            )

    def kept(self, context: Context) -> int:
        return by_largest_remainder(self.patches(context).grid ** 2, (1 - self.removed, self.removed))[0]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the decoder, which predicts removed patches alone."""
        patches = self.patches(context)
        return self.decoder_operations(context, patches.grid**2 - self.kept(context), _CHANNELS * patches.size**2)


class IJEPA(WithDecoder):
    """I-JEPA (Assran et al., 2023; arXiv:2301.08243): of some patches, the model predicts what it makes of others.

    The teacher, an average of the model, sees the whole image. The model sees a part of its patches, and a predictor,
    Transformer blocks with the fixed positions of MAE, predicts the teacher's tokens in several blocks of patches.
    """

    implementation: ClassVar[str] = "vitscale.objectives.ijepa:IJEPA"
    own: ClassVar[tuple[str, ...]] = ("mask", "predictor.")
    part: ClassVar[str] = "predictor"
    prepares: ClassVar[Literal["average"]] = "average"

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
