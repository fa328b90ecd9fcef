"""Vision Transformers: those of the paper (section 3.1), hybrids, axial models (appendix D.5), all positions (D.3).

Transformer sizes Ti, S, B, L, H are the paper's (Table 1) and its follow-up's (Steiner et al., 2021); b is B with every
width halved (the paper's Figure 4); g and G are those of "Scaling Vision Transformers" (Zhai et al., 2021).

Shape legend: n patches along one side, N patches, T tokens (N, or N + 1 with a class token), D width, K classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vitscale.block import Block
from vitscale.families.family import Model, Patches, Pool, complete
from vitscale.families.resnet import Blocks, ResNetShape, WidthFactor, feature_operations, small_stages
from vitscale.operations import Operation, block_of, dense, parameters, product

#            width  depth  mlp  heads
_SIZES = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "b": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
# (name of the stem, pixels a token stands for) -> blocks of the stem, patch size on its feature map. At /16 the fourth
# stage is gone and its blocks are in the third (section 4.1). The tiny R is a root without stages; in its published
# name /16 is not what a token stands for, which is 32 pixels.
_STEMS = {
    ("R50", "32"): ((3, 4, 6, 3), 1),
    ("R50", "16"): ((3, 4, 9), 1),
    ("R26", "32"): ((2, 2, 2, 2), 1),
    ("R", "16"): ((), 8),
}
_OF_EMBEDDINGS = re.compile(r"(stem|embedding|cls|pos_embedding)(\.|$)")
_OF_BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class ViTShape:
    """The dimensions of one Vision Transformer.

    `width` is the hidden size D, `mlp_dim` the hidden size of the MLP. `patch_size` P counts pixels, or in a hybrid,
    which has a `stem`, steps of its feature map. With `attention` axial each of the `depth` blocks is a row and a
    column block.
    """

    patch_size: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    attention: Literal["full", "axial"] = "full"
    stem: ResNetShape | None = None

    def cut_size(self, image_size: int) -> int:
        """Side of what is cut into patches: the image, or the stem's feature map."""
        return image_size if self.stem is None else self.stem.feature_size(image_size)

    def grid(self, image_size: int) -> int:
        """Patches along one side of a square image; what lies beyond the last whole patch is not seen."""
        return self.cut_size(image_size) // self.patch_size

    @property
    def stride(self) -> int:
        """Pixels of the image for one patch."""
        return self.patch_size * (1 if self.stem is None else self.stem.stride)

    @property
    def patch_dim(self) -> int:
        """Values in one patch: P * P * channels."""
        return self.patch_size**2 * (3 if self.stem is None else self.stem.channels)


class Position(Block):
    """How positions are told to a Transformer, and where (appendix D.3); `relative` is told in every attention."""

    kind: Literal["none", "1d", "2d", "relative"] = Field(
        "1d",
        description="learned embeddings by patch (1d) or by row and column (2d), a learned bias by distance, or none",
    )
    at: Literal["stem", "every_layer", "shared"] = Field(
        "stem", description="of 1d and 2d: before the first block, before every block, or the same before every block"
    )

    @model_validator(mode="after")
    def _somewhere(self) -> "Position":
        if self.kind in ("none", "relative") and self.at != "stem":
            raise ValueError(f"at: {self.at} belongs to kind: 1d and 2d, and kind is {self.kind}")
        return self


class ViT(Model):
    """The architecture: a Vision Transformer, by a `name` such as ViT-B/16, by its dimensions, or by a name with some
    of them replaced.

    With `blocks` it is a hybrid: they and `width_factor` are those of its stem, a ResNet, and patch_size counts steps
    of the stem's feature map.
    """

    implementation: ClassVar[str] = "vitscale.models.vit:ViT"
    title: ClassVar[str] = "Transformer"
    names: ClassVar[tuple[str, ...]] = (
        *("ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-b/32", "ViT-B/32", "ViT-B/16", "ViT-B/8"),
        *("ViT-L/32", "ViT-L/16", "ViT-H/14", "ViT-g/14", "ViT-G/14"),
        *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32"),
        *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
        *("Axial-ViT-B/32", "Axial-ViT-B/16"),
    )
    patterns: ClassVar[str] = (
        f"ViT-SIZE/PATCH or Axial-ViT-SIZE/PATCH with SIZE one of {', '.join(_SIZES)}, "
        f"{', '.join(f'{stem}+ViT-SIZE/{patch}' for stem, patch in _STEMS)}"
    )
    dimensions: ClassVar[tuple[str, ...]] = (
        *("patch_size", "width", "depth", "mlp_dim", "num_heads", "attention"),
        *("blocks", "width_factor"),
    )

    patch_size: int | None = Field(None, ge=1, le=8192, description="side of a patch in pixels")
    width: int | None = Field(None, ge=1, le=2**17, description="size of a token")
    depth: int | None = Field(None, ge=1, le=1024, description="number of Transformer blocks")
    mlp_dim: int | None = Field(None, ge=1, le=2**19, description="size of the hidden layer of a block's MLP")
    num_heads: int | None = Field(None, ge=1, le=1024, description="attention heads of a block; they divide the width")
    attention: Literal["full", "axial"] | None = Field(None, description="axial: row blocks and column blocks")
    blocks: Blocks = None
    width_factor: WidthFactor = None
    pool: Pool | None = Field(
        None,
        description="how tokens become one vector: the class token or their mean; default: cls, and mean with axial "
        "attention, which has no class token",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations that are zeroed while training")
    position: Position = Position()

    @model_validator(mode="after")
    def _possible(self) -> "ViT":
        shape = self.shape()
        if shape.width % shape.num_heads:
            raise ValueError(f"width {shape.width} does not divide into num_heads {shape.num_heads}")
        if shape.width % 2 and self.position.kind == "2d":
            raise ValueError(f"position.kind 2d: width {shape.width} does not divide into an x and a y half")
        if shape.attention == "axial" and self.pool == "cls":
            raise ValueError("pool: cls: axial attention works on a grid, which has no class token; use pool: mean")
        return self

    # ---- What it is --------------------------------------------------------------------------------------------------

    @classmethod
    def named(cls, name: str) -> ViTShape | None:
        """As `Model.named`: `ViT-L/16`, `R50+ViT-B/16`, `Axial-ViT-B/32`."""
        match = re.fullmatch(r"(?:(R[0-9]*)(?:x1)?\+|(Axial-))?ViT-([A-Za-z]+)/([1-9][0-9]{0,3})", name)
        if match is None:
            return None
        stem, axial, size, patch = match.groups()
        if size not in _SIZES or (stem is not None and (stem, patch) not in _STEMS):
            return None
        width, depth, mlp_dim, num_heads = _SIZES[size]
        shape = ViTShape(int(patch), width, depth, mlp_dim, num_heads, "axial" if axial else "full")
        if stem is None:
            return shape
        blocks, patch_size = _STEMS[stem, patch]
        return replace(shape, patch_size=patch_size, stem=ResNetShape(blocks, variant="v1"))

    @classmethod
    def refusal(cls, key: str, value: Any, name: str | None) -> str:
        """As `Model.refusal`."""
        return f"{key} belongs to ResNets; the stem of a hybrid is v1 with convolutions"

    def shape(self) -> ViTShape:
        """As `Model.shape`."""
        named = None if self.name is None else self.named(self.name)
        given = self.given(self.dimensions)
        of_stem = {key: given.pop(key) for key in ("blocks", "width_factor") if key in given}
        if of_stem:
            stem = None if named is None else named.stem
            given["stem"] = complete(ResNetShape, stem, {"variant": "v1"} | of_stem)
        return complete(ViTShape, named, given)

    def describe_dimensions(self) -> str:
        """As `Model.describe_dimensions`."""
        shape = self.shape()
        stem = "" if shape.stem is None else f"R{list(shape.stem.blocks)}x{shape.stem.width_factor}+"
        return f"{stem}L{shape.depth} D{shape.width} MLP{shape.mlp_dim} /{shape.patch_size}"

    @property
    def kind(self) -> str:
        """As `Model.kind`."""
        shape = self.shape()
        if shape.attention == "axial":
            return "axial"
        return "vit" if shape.stem is None else "hybrid"

    def facts(self) -> dict[str, Any]:
        """As `Model.facts`."""
        return super().facts() | {f"position.{key}": value for key, value in self.position}

    def pool_or_default(self) -> Pool:
        """As `Model.pool_or_default`."""
        return self.pool or ("mean" if self.shape().attention == "axial" else "cls")

    # ---- On images of a size -----------------------------------------------------------------------------------------

    def check_image_size(self, image_size: int) -> None:
        """As `Model.check_image_size`: an image has a patch."""
        shape = self.shape()
        size, patch = shape.cut_size(image_size), shape.patch_size
        if size < patch:
            cut = "the image" if shape.stem is None else "the feature map"
            raise ValueError(f"{cut} of {size} x {size} is smaller than one patch of {patch} x {patch}")

    def describe_border(self, image_size: int) -> str | None:
        """As `Model.describe_border`: what lies right of and below the last whole patch."""
        shape = self.shape()
        unseen, grid = shape.cut_size(image_size) % shape.patch_size, shape.grid(image_size)
        if unseen == 0:
            return None
        unit = "pixel" if shape.stem is None else "feature map step"
        amount = f"1 {unit} right and below is" if unseen == 1 else f"{unseen} {unit}s right and below are"
        return f"{image_size} x {image_size} pixels are {grid} x {grid} patches; {amount} not seen"

    def num_tokens(self, image_size: int) -> int:
        """T: the patches of a square image, and the class token where there is one."""
        return self.shape().grid(image_size) ** 2 + (self.pool_or_default() == "cls")

    def patches(self, image_size: int) -> Patches | None:
        """As `Model.patches`."""
        shape = self.shape()
        return Patches(shape.patch_size, shape.grid(image_size), shape.width) if shape.stem is None else None

    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        """As `Model.operations`.

        Both products of attention are `scores`, products with embeddings of offsets `relative`. The number of heads
        does not enter.
        """
        shape = self.shape()
        D, n, T = shape.width, shape.grid(image_size), self.num_tokens(image_size)
        operations = [] if shape.stem is None else feature_operations(shape.stem, image_size)
        operations.append(dense("patch_embedding", n**2, shape.patch_dim, D, input_gradient=shape.stem is not None))
        class_token = D if self.pool_or_default() == "cls" else 0
        if class_token:
            operations.append(parameters("class_token", class_token))
        if self.position.kind in ("1d", "2d"):
            once = T * D if self.position.kind == "1d" else 2 * n * (D // 2) + class_token
            operations.append(parameters("positions", once * (shape.depth if self.position.at == "every_layer" else 1)))
        relative = self.position.kind == "relative"
        if shape.attention == "axial":
            block = 2 * _block(shape, sequences=n, T=n, relative=relative)
        else:
            block = _block(shape, sequences=1, T=T, relative=relative)
        for index in range(shape.depth):
            # A block ends with the output of its MLP, which only dropout's mask is drawn behind.
            operations += block_of(block, index, needs_output=self.dropout > 0)
        operations.append(parameters("norms", 2 * D))
        if num_classes is not None:
            if self.head == "pretrain":
                operations.append(dense("pre_logits", 1, D, D))
            operations.append(dense("head", 1, D, num_classes))
        return operations

    # ---- What can be done with it ------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """As `Model.num_blocks`."""
        return self.shape().depth

    def with_blocks(self, count: int) -> Self:
        """As `Model.with_blocks`."""
        return self.model_copy(update={"depth": count})

    def layers_above(self, parameter: str) -> int:
        """As `Model.layers_above`: of block i of d from 0 it is d - i, of the embeddings and the stem d + 1."""
        if block := _OF_BLOCK.match(parameter):
            return self.num_blocks - int(block[1])
        return self.num_blocks + 1 if _OF_EMBEDDINGS.match(parameter) else 0

    @property
    def has_attention_bias(self) -> bool:
        """As `Model.has_attention_bias`."""
        return self.position.kind == "relative"

    @property
    def draws(self) -> bool:
        """As `Model.draws`."""
        return self.dropout > 0

    def small(self) -> tuple[dict[str, Any], int]:
        """As `Model.small`; the image is 64 pixels wide, or the first power of two that holds a patch."""
        shape, size = self.shape(), 64
        small = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
        if shape.stem is not None:
            small |= small_stages(shape.stem)
        while shape.grid(size) == 0:
            size *= 2
        return small, size


def _block(shape: ViTShape, *, sequences: int, T: int, relative: bool) -> list[Operation]:
    """One encoder block over independent sequences of T tokens: the whole image, or its rows or columns."""
    D, offsets = shape.width, 2 * T - 1
    told = [product("relative", sequences * T * offsets * D, params=offsets * D)] if relative else []
    return [
        parameters("norms", 4 * D),
        dense("qkv", sequences * T, D, 3 * D),
        product("scores", 2 * sequences * T**2 * D),
        *told,
        dense("out", sequences * T, D, D),
        dense("mlp", sequences * T, D, shape.mlp_dim),
        dense("mlp", sequences * T, shape.mlp_dim, D),
    ]
