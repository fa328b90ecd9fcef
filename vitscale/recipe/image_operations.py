"""Operations on training images after crop and flip, as a recipe says them: one block for each kind.

The loader's threads do ours on uint8 pixels; all others run on the device.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vitscale.ground.block import Block

_Probability = Annotated[float, Field(ge=0, le=1)]
_Range = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
_Colour = Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=3, max_length=3)]


class ImageOperation(Block):
    """The base of every block of `data.operations`."""

    # `module:class` of the `vitscale.data.image_operations.ImageOperation` that computes it on the device.
    implementation: ClassVar[str]
    # What it works on: uint8 from 0 to 255, before images are normalised, or fp32 in [-1, 1] after that.
    pixels: ClassVar[Literal["uint8", "float"]]

    kind: str = Field(description="the dotted path of its block, such as my_package.Solarize, whose keys stand here")

    @property
    def place(self) -> int:
        """Sort key of the order of operations: 0 in the loader, 1 on the device's uint8 pixels, 2 on its floats."""
        return 0 if isinstance(self, LoaderOperation) else {"uint8": 1, "float": 2}[self.pixels]


class LoaderOperation(ImageOperation):
    """The base of those that the loader does: `vitscale.data.pixel_programs` plans them, without torch."""

    pixels: ClassVar[Literal["uint8", "float"]] = "uint8"


class RandAugment(LoaderOperation):
    """n operations, drawn from a set with replacement, of magnitude m (Cubuk et al., 2019; arXiv:1909.13719).

    `timm_increasing` is timm's `inc1`; its rand-m9-mstd0.5-inc1 is {set: timm_increasing, m: 9, std: 0.5}.
    `big_vision` is that of AugReg and big_vision, whose medium1 is {set: big_vision, m: 15}.
    """

    kind: Literal["randaugment"] = Field(description="chooses this operation")
    set: Literal["timm", "timm_increasing", "big_vision"]
    """which operations, and how magnitudes map to their strength; in timm_increasing a higher magnitude is always
    stronger"""
    n: int = Field(2, ge=1, le=16, description="number of operations")
    m: float = Field(9, ge=0, le=30, description="their magnitude, at most 10 in timm's sets")
    std: float = Field(0, ge=0, le=10)
    """standard deviation of the magnitude, which is limited to 0 to 10 or 30"""
    probability: _Probability | None = None
    """probability of applying each of the n; default: 0.5 in timm's sets, 1 in big_vision's"""
    interpolation: Literal["nearest", "bilinear", "bicubic", "random"] | None = None
    """interpolation of geometric operations; random: bilinear or bicubic; default: random in timm's sets, nearest in
    big_vision's"""
    fill: _Colour = Field([128, 128, 128])
    """red, green, blue of empty areas after geometric operations; timm uses the mean"""

    def _contradictions(self) -> Iterator[str]:
        if self.set != "big_vision" and self.m > 10:
            yield f"m {self.m:g}: magnitudes of set: {self.set} end at 10"


class ThreeAugment(LoaderOperation):
    """One of gray, solarization and Gaussian blur, followed by colour jitter (DeiT-III, arXiv:2204.07118)."""

    kind: Literal["three_augment"] = Field(description="chooses this operation")
    jitter: float = Field(0.3, ge=0, le=1)
    """brightness, contrast and saturation each change by a factor from 1 - this to 1 + this"""


class ColorJitter(LoaderOperation):
    """Brightness, contrast, saturation and hue, in random order, as torchvision's ColorJitter on Pillow's images."""

    _later_keys: ClassVar[tuple[str, ...]] = ("hue",)

    kind: Literal["color_jitter"] = Field(description="chooses this operation")
    brightness: float = Field(0.4, ge=0, le=10, description="range of the factor: 1 - this (at least 0) to 1 + this")
    contrast: float = Field(0.4, ge=0, le=10, description="range of the factor: 1 - this (at least 0) to 1 + this")
    saturation: float = Field(0.4, ge=0, le=10, description="range of the factor: 1 - this (at least 0) to 1 + this")
    hue: float = Field(0.0, ge=0, le=0.5, description="hues turn by up to this share of a turn, either way")
    probability: _Probability = Field(1.0, description="probability of changing an image")


class Gray(LoaderOperation):
    """Conversion to gray."""

    kind: Literal["gray"] = Field(description="chooses this operation")
    probability: _Probability = Field(0.2, description="probability of changing an image")


class GaussianBlur(LoaderOperation):
    """Gaussian blur: as Pillow's GaussianBlur, three box filters, or with `kernel` a Gaussian, as torchvision's."""

    _later_keys: ClassVar[tuple[str, ...]] = ("kernel",)

    kind: Literal["gaussian_blur"] = Field(description="chooses this operation")
    probability: _Probability = Field(0.5, description="probability of changing an image")
    radius: _Range = Field([0.1, 2.0], description="lowest and highest standard deviation in pixels, at most 50")
    kernel: int | None = Field(None, ge=3, le=9)
    """pixels of the kernel along each side, an odd number, as torchvision's kernel_size, mirrored at the border; DINOv2
    has 9"""

    def _contradictions(self) -> Iterator[str]:
        if self.kernel is not None and self.kernel % 2 == 0:
            yield f"kernel {self.kernel}: expected an odd number, 3 to 9"
        if not self.radius[0] <= self.radius[1] <= 50:
            yield f"radius must be [low, high] with 0 < low <= high <= 50, not {self.radius}"


class Solarize(LoaderOperation):
    """Inverts the bright pixels of an image."""

    kind: Literal["solarize"] = Field(description="chooses this operation")
    probability: _Probability = Field(0.2, description="probability of changing an image")
    threshold: int = Field(128, ge=0, le=256, description="lowest inverted value")


class RandomErasing(ImageOperation):
    """Erases a rectangle after normalisation (Zhong et al., 2017; arXiv:1708.04896), as timm does."""

    implementation: ClassVar[str] = "vitscale.data.random_erasing:RandomErasing"
    pixels: ClassVar[Literal["uint8", "float"]] = "float"

    kind: Literal["random_erasing"] = Field(description="chooses this operation")
    probability: _Probability = Field(0.25, description="probability of changing an image")
    mode: Literal["pixel", "mean"] = "pixel"
    """new content: pixel: noise of mean 0 and variance 1; mean: 0, which is data.normalise.mean"""
    area: _Range = Field([0.02, 1 / 3], description="lowest and highest share of the image's area")
    aspect: _Range = Field([0.3, 1 / 0.3], description="lowest and highest height / width")

    def _contradictions(self) -> Iterator[str]:
        for name, (low, high), ceiling in (("area", self.area, 1.0), ("aspect", self.aspect, 100.0)):
            if not low <= high <= ceiling:
                yield f"{name} must be [low, high] with 0 < low <= high <= {ceiling:g}, not {[low, high]}"


AnyOperation = RandAugment | ThreeAugment | ColorJitter | Gray | GaussianBlur | Solarize | RandomErasing
"""Any of vitscale's own operations."""
