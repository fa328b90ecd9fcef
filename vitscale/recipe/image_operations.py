"""What happens to training images on the device, as a recipe says it: the base of each block of `data.operations`."""

from typing import ClassVar, Literal

from pydantic import Field

from vitscale.block import Block


class ImageOperation(Block):
    """An operation of another package on training images, which are on the device then."""

    # `module:class` of the `vitscale.data.ImageOperation` that computes it.
    implementation: ClassVar[str]
    # What it works on: uint8 from 0 to 255, before images are normalised, or fp32 in [-1, 1] after that.
    pixels: ClassVar[Literal["uint8", "float"]]

    kind: str = Field(description="the dotted path of its block, such as my_package.Solarize, whose keys stand here")
