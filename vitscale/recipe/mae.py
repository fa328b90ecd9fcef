"""The `objective` block of masked autoencoders, and what is known about it without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field

from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe.families import Patches, ViTShape
from vitscale.recipe.families.vit import axes_by_head
from vitscale.recipe.families.vit_shape import block_operations, norm_parameters
from vitscale.recipe.objectives import Context, Objective
from vitscale.recipe.shares import by_largest_remainder

_MLP_RATIO = 4  # of the decoder's width, as in its authors' code
_CHANNELS = 3


class MAE(Objective):
    """Masked autoencoder (He et al., 2022): a small decoder predicts the pixels of patches that the model never sees.

    The model sees the other patches alone. The decoder, Transformer blocks with the fixed positions of MAE, sees what
    the model makes of them, and a learned [mask] embedding for each removed patch. Labels are not used, and the model
    has no head.
    """

    implementation: ClassVar[str] = "vitscale.objectives.mae:MaskedAutoencoder"
    has_classes: ClassVar[bool] = False
    needs_whole_patches: ClassVar[bool] = True
    own: ClassVar[tuple[str, ...]] = ("mask", "decoder.")

    kind: Literal["mae"] = Field(description="chooses this objective")
    removed: float = Field(0.75, gt=0, lt=1, description="share of an image's patches that is removed, rounded")
    decoder_width: int = Field(512, ge=4, le=2**17, description="width of the decoder's tokens")
    decoder_depth: int = Field(8, ge=1, le=1024, description="number of the decoder's Transformer blocks")
    decoder_heads: int = Field(16, ge=1, le=1024, description="attention heads per block; must divide decoder_width")
    norm_pix: bool = True
    """predict each patch's pixels less their mean, divided by their standard deviation; false: the pixels themselves"""

    def _contradictions(self) -> Iterator[str]:
        if self.decoder_width % self.decoder_heads:
            yield (
                f"decoder_width {self.decoder_width} does not divide into decoder_heads {self.decoder_heads}; give a "
                f"divisor, such as {max(n for n in range(1, self.decoder_heads) if self.decoder_width % n == 0)}"
            )
        if self.decoder_width % 4:
            yield (
                f"decoder_width {self.decoder_width} has to be a multiple of 4, for sines and cosines by row and by "
                f"column, such as {self.decoder_width // 4 * 4 + 4}"
            )

    def check(self, context: Context) -> None:
        size, patches = context.data.image_size, context.model.patches(context.data.image_size)
        if patches is None:
            raise ValueError("objective.kind: mae needs a model that cuts the picture itself into patches")
        for key in ("num_classes", "head_bias"):
            if getattr(context.model, key) is not None:
                raise ValueError(f"model.{key}: with objective.kind: mae the model has no head; set it null")
        if context.model.pool_or_default() == "map":
            raise ValueError("model.pool map: with objective.kind: mae nothing trains the pooling; use cls or mean")
        if unseen := size % patches.size:
            raise ValueError(
                f"data.image_size {size}: objective.kind: mae predicts whole patches, and {size} is no multiple of "
                f"{patches.size}; use {size - unseen} or {size - unseen + patches.size}"
            )
        number, kept = patches.grid**2, self.kept(context)
        if not 0 < kept < number:
            raise ValueError(
                f"objective.removed {self.removed:g} of {number} patches keeps {kept}; at least one has to be kept and "
                f"one removed"
                + (f": 0.5 keeps {(number + 1) // 2}" if number > 1 else "; use a larger data.image_size")
            )
        try:
            self.model_operations(context, None)
        except ValueError as error:
            raise ValueError(f"objective.kind: mae: {error}") from None

    def kept(self, context: Context) -> int:
        """As `Objective.kept`: what is not removed."""
        return by_largest_remainder(_patches(context).grid ** 2, (1 - self.removed, self.removed))[0]

    @property
    def decoder_shape(self) -> ViTShape:
        """The dimensions of the decoder's blocks, which are those of its authors."""
        width = self.decoder_width
        return ViTShape(1, width, self.decoder_depth, _MLP_RATIO * width, self.decoder_heads, mlp="exact_gelu")

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As `Objective.axes`: those of the decoder's own heads."""
        return axes_by_head(self.decoder_shape, parameter, shape)

    def model_operations(self, context: Context, num_classes: int | None) -> Sequence[Operation]:
        """As `Objective.model_operations`: only on the patches that are kept."""
        return context.model.operations_of_part(context.data.image_size, num_classes, self.kept(context))

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: the decoder, which predicts removed patches alone."""
        patches, shape, kept = _patches(context), self.decoder_shape, self.kept(context)
        tokens = context.model.num_tokens(context.data.image_size)
        assert tokens is not None, "a model with patches has tokens"
        D, removed = shape.width, patches.grid**2 - kept
        block = block_operations(shape, sequences=1, T=tokens, relative=False)
        operations = [dense("", tokens - removed, patches.width, D), parameters("", D)]
        for index in range(shape.depth):
            operations += block_of(block, index, needs_output=False)
        operations += [parameters("", norm_parameters(shape, D)), dense("", removed, D, _CHANNELS * patches.size**2)]
        return [replace(operation, part="decoder") for operation in operations]

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: with a small decoder."""
        return self.model_copy(update={"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2})


def _patches(context: Context) -> Patches:
    patches = context.model.patches(context.data.image_size)
    assert patches is not None, "the objective's own check"
    return patches
