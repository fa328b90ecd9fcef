"""Swin Transformers (Liu et al., 2021): four stages of attention within windows, every second time shifted ones.

Shape legend: h rows (and columns) of a stage's feature map, n of a window, T = n * n its tokens, C channels, A heads.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from vitscale.ground.operations import Operation, block_of, dense, parameters, product
from vitscale.recipe.families.family import Model, complete
from vitscale.recipe.families.resnet import Blocks

MLP_RATIO = 4
"""The hidden layer of an MLP is so many times as wide as the tokens."""

#       width  blocks  heads, of the first stage; each later stage has twice as many as the one before
_SIZES = {
    "T": (96, (2, 2, 6, 2), 3),
    "S": (96, (2, 2, 18, 2), 3),
    "B": (128, (2, 2, 18, 2), 4),
    "L": (192, (2, 2, 18, 2), 6),
}
_OF_EMBEDDING = re.compile(r"embedding(_norm)?\.")
_OF_BLOCK = re.compile(r"blocks\.(\d+)\.(merging\.)?")
_TO_HEADS = re.compile(r"blocks\.(\d+)\.attention\.qkv\.(weight|bias)$")
_FROM_HEADS = re.compile(r"blocks\.(\d+)\.attention\.out\.weight$")


@dataclass(frozen=True)
class SwinShape:
    """The dimensions of one Swin Transformer; the keys of `Swin` say what they mean."""

    width: int
    blocks: tuple[int, ...]
    num_heads: int
    window: int
    patch_size: int = 4

    @property
    def channels(self) -> int:
        """Channels of the last feature map."""
        return self.width_of(len(self.blocks) - 1)

    @property
    def stride(self) -> int:
        """Image pixels per step of the last feature map, along one side."""
        return self.stride_of(len(self.blocks) - 1)

    @property
    def patch_dim(self) -> int:
        """Values in one patch: P * P * 3."""
        return 3 * self.patch_size**2

    def width_of(self, stage: int) -> int:
        """Channels of a stage, counted from 0."""
        return self.width * 2**stage

    def heads_of(self, stage: int) -> int:
        """Heads of each attention of a stage."""
        return self.num_heads * 2**stage

    def stride_of(self, stage: int) -> int:
        """Image pixels per step of a stage's feature map, along one side."""
        return self.patch_size * 2**stage

    def size_of(self, stage: int, image_size: int) -> int:
        """The side of a stage's feature map; patches and merged patches that are not whole are padded with zeros."""
        return -(-image_size // self.stride_of(stage))

    def window_of(self, stage: int, image_size: int) -> int:
        """The side of a stage's windows: no larger than its feature map."""
        return min(self.window, self.size_of(stage, image_size))

    def stages(self) -> list[tuple[int, int]]:
        """(stage, place in the stage) of every block, both counted from 0."""
        return [(stage, place) for stage, length in enumerate(self.blocks) for place in range(length)]

    def shift_of(self, stage: int, place: int, image_size: int) -> int:
        """How far a block's windows are shifted: by half of their side in every second block, if there are several."""
        window = self.window_of(stage, image_size)
        return window // 2 if place % 2 and window < self.size_of(stage, image_size) else 0

    def drop_path_of(self, index: int, of_last: float) -> float:
        """The share of samples for which a branch of block `index` is left out: grows linearly from 0 to `of_last`."""
        return of_last * index / max(sum(self.blocks) - 1, 1)


class Swin(Model):
    """The architecture: a Swin Transformer, by a `name` such as Swin-B, by its dimensions, `window` among them, or by a
    name with some of them replaced.
    """

    implementation: ClassVar[str] = "vitscale.models.swin:Swin"
    title: ClassVar[str] = "Swin"
    positions_rule: ClassVar[str] = "resampled, bicubic, as biases of another window"
    has_equal_blocks: ClassVar[bool] = False
    has_attention_bias: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = tuple(f"Swin-{size}" for size in _SIZES)
    dimensions: ClassVar[tuple[str, ...]] = ("patch_size", "width", "blocks", "num_heads", "window")
    optional: ClassVar[tuple[str, ...]] = ("window", "drop_path")

    patch_size: int | None = Field(None, ge=1, le=8192, description="side of a patch in pixels, default 4")
    width: int | None = Field(None, ge=1, le=2**17)
    """width of a token of the first stage; it doubles from stage to stage"""
    blocks: Blocks = Field(None, description="Transformer blocks of each stage")
    num_heads: int | None = Field(None, ge=1, le=1024)
    """attention heads per block of the first stage, twice as many in each later one; must divide the width"""
    window: int | None = Field(None, ge=1, le=64)
    """side of a window of attention in tokens, 7 in named models; where a feature map is smaller, its side"""
    drop_path: float = Field(0.0, ge=0, lt=1)
    """share of samples for which the last block's attention, and independently its MLP, is dropped in training; it
    grows from 0 in the first block"""

    def _contradictions(self) -> Iterator[str]:
        shape = self.shape()
        if not shape.blocks:
            yield "blocks []: a Swin needs a stage"
        if shape.width % shape.num_heads:
            yield f"width {shape.width} does not divide into num_heads {shape.num_heads}"

    @classmethod
    def named(cls, name: str) -> SwinShape | None:
        family, _, size = name.partition("-")
        return SwinShape(*_SIZES[size], window=7) if family == "Swin" and size in _SIZES else None

    @property
    def representation_width(self) -> int:
        return self.shape().channels

    def shape(self) -> SwinShape:
        named = None if self.name is None else self.named(self.name)
        return complete(SwinShape, named, self.given(self.dimensions))

    def describe_dimensions(self) -> str:
        shape = self.shape()
        return f"Swin{list(shape.blocks)} D{shape.width} /{shape.patch_size} window {shape.window}"

    def positions_of(self, image_size: int) -> object:
        shape = self.shape()
        return [shape.window_of(stage, image_size) for stage in range(len(shape.blocks))]

    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        """As `Model.operations`: a breakdown by stage, in which patch merging belongs to the stage that it makes."""
        shape = self.shape()
        grid = shape.size_of(0, image_size)
        operations = [
            dense("patch_embedding", grid**2, shape.patch_dim, shape.width, input_gradient=False),
            parameters("norms", 2 * shape.width),
        ]
        for index, (stage, place) in enumerate(shape.stages()):
            block = _block(shape, stage, image_size, merges=stage > 0 and place == 0)
            # As in a ViT: the output is needed only for a mask drawn after it.
            operations += block_of(block, index, needs_output=shape.drop_path_of(index, self.drop_path) > 0)
        operations.append(parameters("norms", 2 * shape.channels))
        if num_classes is not None:
            operations.append(dense("head", 1, shape.channels, num_classes))
        return operations

    @property
    def num_blocks(self) -> int:
        return sum(self.shape().blocks)

    def layers_above(self, parameter: str) -> int:
        """As `Model.layers_above`: d - i for block i (from 0) of d, d + 1 for the embeddings, else 0.

        Patch merging counts with the block before it, as in SimMIM (Xie et al., 2022).
        """
        if block := _OF_BLOCK.match(parameter):
            return self.num_blocks - int(block[1]) + bool(block[2])
        return self.num_blocks + 1 if _OF_EMBEDDING.match(parameter) else 0

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As `Model.axes`: query, key, value stacked, each (A, d, C) or (A, d); out (C, A, d); patches (C, P, P, 3)."""
        own = self.shape()
        if found := _TO_HEADS.match(parameter) or _FROM_HEADS.match(parameter):
            stage, _ = own.stages()[int(found[1])]
            heads, head_dim = own.heads_of(stage), own.width // own.num_heads
            is_out = _FROM_HEADS.match(parameter) is not None
            return (shape[0], heads, head_dim) if is_out else (3, heads, head_dim, *shape[1:])
        return (shape[0], own.patch_size, own.patch_size, 3) if parameter == "embedding.weight" else shape

    def small(self) -> tuple[dict[str, Any], int]:
        """As `Model.small`; images of 16 patches a side: windows are shifted in two stages, and whole in the others."""
        shape = self.shape()
        return {"width": 32, "blocks": [2] * len(shape.blocks), "num_heads": 2, "window": 4}, 16 * shape.patch_size


def _block(shape: SwinShape, stage: int, image_size: int, *, merges: bool) -> list[Operation]:
    """One block; windows beyond the border of the feature map are computed as well, up to their output."""
    part, C, A = f"stage{stage + 1}", shape.width_of(stage), shape.heads_of(stage)
    size, n = shape.size_of(stage, image_size), shape.window_of(stage, image_size)
    windows = (-(-size // n)) ** 2
    operations = [parameters(part, 4 * C)]
    if merges:
        operations = [parameters(part, 4 * C), dense(part, size**2, 2 * C, C, bias=False), *operations]
    return [
        *operations,
        dense(part, windows * n**2, C, 3 * C),
        product(part, 2 * windows * n**4 * C, params=(2 * n - 1) ** 2 * A),
        dense(part, size**2, C, C),
        dense(part, size**2, C, MLP_RATIO * C),
        dense(part, size**2, MLP_RATIO * C, C),
    ]
