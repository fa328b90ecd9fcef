"""The `objective` block of masked autoencoders, and what is known about it without torch."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from vitscale.ground.operations import Operation
from vitscale.recipe.headless import WithDecoder
from vitscale.recipe.objectives import Context
from vitscale.recipe.shares import by_largest_remainder

_CHANNELS = 3


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
