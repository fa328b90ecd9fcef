"""ResNets (BiT), as baselines and stems of hybrids, and AxialResNets, with axial attention for 3x3 convolutions."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vitscale.ground.operations import Operation, block_of, convolution, dense, parameters, product
from vitscale.recipe.families.family import Model, complete

GROUPS = 32
"""The number of groups of every group norm; all channel counts are multiples of it."""
AXIAL_HEADS = 8
"""The number of heads of each attention in an AxialResNet."""

_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}


@dataclass(frozen=True)
class ResNetShape:
    """The dimensions of one ResNet (BiT), or of the stem of a hybrid."""

    blocks: tuple[int, ...]  # bottleneck units in each stage
    width_factor: int = 1  # stage s has 256 * 2^s * width_factor channels, and a quarter of that inside a unit
    variant: Literal["v1", "v2"] = "v2"  # pre-activation, as in the released BiT weights; v1: post-activation
    # What mixes positions in a unit: a 3x3 convolution, or row and column attention instead of it (AxialResNet).
    mixing: Literal["conv", "axial"] = "conv"

    @property
    def root_channels(self) -> int:
        """Output channels of the 7x7 convolution."""
        return 64 * self.width_factor

    def stage_channels(self, stage: int) -> int:
        """Output channels of a stage, counted from 0."""
        return 256 * 2**stage * self.width_factor

    @property
    def channels(self) -> int:
        """Channels of the last feature map."""
        return self.stage_channels(len(self.blocks) - 1) if self.blocks else self.root_channels

    @property
    def stride(self) -> int:
        """Image pixels per step of the last feature map, along one side."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    def drop_path_of(self, index: int, of_last: float) -> float:
        """The share of samples for which unit `index` is only its shortcut: grows linearly from 0 to `of_last`."""
        return of_last * index / max(sum(self.blocks) - 1, 1)

    def feature_size(self, image_size: int) -> int:
        """The side of the last feature map; each halving rounds up."""
        return -(-image_size // self.stride)


Blocks = Annotated[
    list[Annotated[int, Field(ge=1, le=1024)]] | None,
    Field(max_length=8, description="residual units of each stage of a ResNet"),
]
WidthFactor = Annotated[
    int | None, Field(ge=1, le=64, description="multiplier of every width of a ResNet: the x2 of R50x2")
]


class ResNet(Model):
    """The architecture: a ResNet, by a `name` such as ResNet50x1, by `blocks`, or by a name with parts replaced."""

    implementation: ClassVar[str] = "vitscale.models.resnet:ResNet"
    title: ClassVar[str] = "ResNet"
    names: ClassVar[tuple[str, ...]] = (
        *("ResNet50x1", "ResNet50x2", "ResNet50x3", "ResNet101x1", "ResNet101x3"),
        *("ResNet152x1", "ResNet152x2", "ResNet152x4", "ResNet200x3", "AxialResNet50"),
    )
    dimensions: ClassVar[tuple[str, ...]] = ("blocks", "width_factor", "variant", "mixing")
    optional: ClassVar[tuple[str, ...]] = ("drop_path",)

    blocks: Blocks = None
    width_factor: WidthFactor = None
    variant: Literal["v1", "v2"] | None = Field(None, description="post- or pre-activation, default v2")
    mixing: Literal["conv", "axial"] | None = None
    """how units mix pixels: 3 x 3 convolution or axial attention; default conv"""
    drop_path: float = Field(0.0, ge=0, lt=1)
    """share of samples for which the last unit is only its shortcut in training; it grows from 0 in the first unit"""
    pool: Literal["cls", "mean"] | None = None
    """how the feature map becomes one vector: always by its mean"""

    def _contradictions(self) -> Iterator[str]:
        if not self.shape().blocks:
            yield "blocks []: a ResNet needs a stage; only the stem of a hybrid may be a root alone"
        if self.pool == "cls":
            yield self.refusal("pool", self.pool, self.name)

    @classmethod
    def named(cls, name: str) -> ResNetShape | None:
        match = re.fullmatch(r"(Axial)?ResNet([0-9]+)(?:x([1-9][0-9]{0,2}))?", name)
        if match is None or match[2] not in _BLOCKS:
            return None
        return ResNetShape(_BLOCKS[match[2]], int(match[3] or 1), mixing="axial" if match[1] else "conv")

    def shape(self) -> ResNetShape:
        named = None if self.name is None else self.named(self.name)
        return complete(ResNetShape, named, self.given(self.dimensions))

    def describe_dimensions(self) -> str:
        shape = self.shape()
        return f"ResNet{list(shape.blocks)}x{shape.width_factor}"

    @property
    def kind(self) -> str:
        return "resnet" if self.shape().mixing == "conv" else "axial"

    @property
    def representation_width(self) -> int:
        return self.shape().channels

    def small(self) -> tuple[dict[str, Any], int]:
        return small_stages(self.shape()), 64

    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        shape = self.shape()
        operations = feature_operations(shape, image_size, self.drop_path)
        if shape.variant == "v2":
            operations.append(parameters("norms", 2 * shape.channels))
        if num_classes is not None:
            operations.append(dense("head", 1, shape.channels, num_classes))
        return operations


def small_stages(shape: ResNetShape) -> dict[str, Any]:
    """The keys that reduce each stage to one narrow unit."""
    return {"blocks": [1] * len(shape.blocks), "width_factor": 1}


def feature_operations(shape: ResNetShape, image_size: int, drop_path: float = 0.0) -> list[Operation]:
    """The operations from the image to the last feature map: `root` and `stage1` to `stage4`, including their norms."""
    channels, size = shape.root_channels, -(-image_size // 4)
    operations = [convolution("root", image_size, 3, channels, 7, stride=2, input_gradient=False)]
    if shape.variant == "v1":
        operations.append(parameters("root", 2 * channels))
    units = 0
    for stage, length in enumerate(shape.blocks):
        outputs = shape.stage_channels(stage)
        for index in range(length):
            stride = 2 if stage > 0 and index == 0 else 1
            unit = _unit(shape, f"stage{stage + 1}", channels, outputs, size, stride)
            # v1 ends with a norm, whose backward pass needs its input. v2 ends with a sum, which needs none, unless a
            # mask is drawn after it.
            draws = shape.drop_path_of(units, drop_path) > 0
            operations += block_of(unit, units, needs_output=draws or shape.variant == "v1")
            units += 1
            channels, size = outputs, -(-size // stride)
    return operations


def _unit(shape: ResNetShape, part: str, inputs: int, outputs: int, size: int, stride: int) -> list[Operation]:
    """One bottleneck unit: the shortcut, if it is a convolution, and the residual branch's three layers."""
    middle, out_size = outputs // 4, -(-size // stride)
    normed = inputs + 2 * middle if shape.variant == "v2" else 2 * middle + outputs
    operations = []
    if inputs != outputs or stride > 1:
        operations.append(convolution(part, size, inputs, outputs, 1, stride))
        normed += outputs if shape.variant == "v1" else 0
    operations.append(convolution(part, size, inputs, middle, 1))
    if shape.mixing == "axial":
        operations += 2 * _line_attention(part, middle, size)
    else:
        operations.append(convolution(part, size, middle, middle, 3, stride))
    operations.append(convolution(part, out_size, middle, outputs, 1))
    operations.append(parameters(part, 2 * normed))
    return operations


def _line_attention(part: str, channels: int, n: int) -> list[Operation]:
    """Attention within each row, or each column, of n x n positions; queries and keys are half as wide as values."""
    head_dim = channels // AXIAL_HEADS
    narrow, wide, offsets = AXIAL_HEADS * (head_dim // 2), AXIAL_HEADS * head_dim, 2 * n - 1
    return [
        dense(part, n**2, channels, 2 * channels, bias=False),
        product(part, n**3 * (narrow + wide)),
        product(part, n**3 * (2 * narrow + wide), params=offsets * 2 * head_dim),
    ]
