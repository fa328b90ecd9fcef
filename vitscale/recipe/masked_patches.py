"""The `objective` block of masked patch prediction, and what is known about it without torch."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from vitscale.ground.block import Block
from vitscale.ground.operations import Operation, dense, parameters
from vitscale.ground.storage import is_url
from vitscale.recipe.data import Normalise
from vitscale.recipe.headless import Headless
from vitscale.recipe.objectives import Context
from vitscale.recipe.shares import by_largest_remainder

_MASKED, _REPLACED, _KEPT = 0.8, 0.1, 0.1  # shares of the corrupted patches (appendix B.1.2)
COLOURS = 512
"""The number of mean colours, with 3 bits per channel."""
CELLS = 4
"""The number of cells along one side of a patch; `cell_colours` predicts the colour of each cell."""


class Counts(NamedTuple):
    """The numbers of patches of an image that are corrupted in each of three ways."""

    masked: int
    replaced: int
    kept: int

    @property
    def corrupted(self) -> int:
        return sum(self)


class Tokenizer(Block):
    """A frozen tokenizer of images, whose numbers of the patches are predicted, as in BEiT (Bao et al., 2022): never
    updated, and not part of checkpoints or exports.

    Its class is built from the folder's config.json and asked by `get_codebook_indices`, as transformers'
    FlavaImageCodebook is (docs/self_supervision.md). It computes in fp32 on every rank.
    """

    kind: Literal["tokenizer"] = Field(description="chooses these targets")
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """its class, module:class, such as transformers:FlavaImageCodebook; of a package that you have allowed, as a dotted
    path"""
    # `from` is a Python keyword, hence the alias.
    source: Annotated[str, Field(alias="from", min_length=1)]
    """the folder of its config.json and model.safetensors"""
    vocabulary: int = Field(8192, ge=2, le=2**20, description="how many numbers there are")
    image_size: int = Field(112, ge=1, le=8192)
    """side of its input in pixels, to which images are resized (bicubic, antialiased); it has to give one number for
    each patch of the model"""
    normalise: Normalise = Normalise(mean=[-0.125] * 3, std=[1.25] * 3)
    """normalisation of its input; default: 0.8 x + 0.1, that of DALL-E's"""

    def _contradictions(self) -> Iterator[str]:
        if is_url(self.source):
            yield f"from {self.source!r}: expected a folder; fetch it first"


class MaskedPatches(Headless):
    """Masked patch prediction (section 4.6, appendix B.1.2): predicts the colours of corrupted patches, or a
    tokenizer's numbers of them.

    Of the corrupted patches, 80 % are replaced by a learned [mask] embedding, 10 % by another patch of the same image,
    and 10 % are kept unchanged. Labels are not used, and the model has no head.
    """

    _later_keys: ClassVar[tuple[str, ...]] = ("targets", "masks")

    implementation: ClassVar[str] = "vitscale.objectives.masked_patches:MaskedPatchPrediction"
    own: ClassVar[tuple[str, ...]] = ("mask", "prediction.weight", "prediction.bias")

    kind: Literal["masked_patches"] = Field(description="chooses this objective")
    target: Literal["mean_colour", "cell_colours", "pixels"] = "mean_colour"
    """what is predicted for a corrupted patch: its mean colour, one of 512; the mean colours of its 4 x 4 cells; or all
    its pixels, with a squared error"""
    targets: Tokenizer | None = None
    share: float = Field(0.5, gt=0, le=1, description="share of an image's patches that is corrupted")
    masks: Literal["scattered", "blocks"] = "scattered"
    """which patches are corrupted: each drawn by itself (scattered), or blocks of at least 16 with aspect ratios from
    0.3 to 3.3, as in BEiT, which are all replaced by [mask]; those that no block completes are drawn one by one"""

    def _contradictions(self) -> Iterator[str]:
        if self.targets is not None and self.target != "mean_colour":
            yield f"targets: a tokenizer says what is predicted, and target says {self.target}; leave one out"

    def check(self, context: Context) -> None:
        patches = self.patches(context)
        super().check(context)
        if {*context.data.normalise.mean, *context.data.normalise.std} != {0.5}:
            raise ValueError(
                "data.normalise: objective.kind: masked_patches predicts pixels, and takes them for ones from -1 to 1; "
                "leave mean and std at 0.5"
            )
        if self.target == "cell_colours" and patches.size % CELLS:
            raise ValueError(
                f"objective.target cell_colours: patches of {patches.size} pixels do not divide into "
                f"{CELLS} x {CELLS} cells"
            )
        if patches.grid**2 < 2 or self.counts(context).masked == 0:
            raise ValueError(
                f"objective.share {self.share:g} of {patches.grid**2} patches: expected at least one corrupted "
                f"patch of several"
            )

    def counts(self, context: Context) -> Counts:
        """The corrupted patches of each image, rounded by largest remainder: half of 196 are 78, 10 and 10."""
        corrupted, _ = by_largest_remainder(self.patches(context).grid ** 2, (self.share, 1 - self.share))
        if self.masks == "blocks":
            return Counts(corrupted, 0, 0)
        return Counts(*by_largest_remainder(corrupted, (_MASKED, _REPLACED, _KEPT)))

    def outputs(self, patch_size: int) -> int:
        """The number of values predicted for one patch."""
        if self.targets is not None:
            return self.targets.vocabulary
        return {"mean_colour": COLOURS, "cell_colours": CELLS**2 * COLOURS, "pixels": 3 * patch_size**2}[self.target]

    def operations(self, context: Context) -> Sequence[Operation]:
        """As `Objective.operations`: predictions are computed only for corrupted patches."""
        patches, rows = self.patches(context), self.counts(context).corrupted
        prediction = dense("prediction", rows, patches.width, self.outputs(patches.size))
        return parameters("mask", patches.width), prediction

    def smoke_form(self) -> Self:
        """As `Objective.smoke_form`: a smoke run has no tokenizer, and predicts mean colours instead of its numbers."""
        return self.model_copy(update={"targets": None})
