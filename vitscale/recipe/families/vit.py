"""Vision Transformers: the paper's (section 3.1), hybrids, axial models (appendix D.5), all position embeddings (D.3).

Shape legend: n patches along one side, N patches, T tokens (N, or N + 1 with a class token), D width, K classes.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vitscale.ground.operations import Operation, block_of, dense, parameters
from vitscale.recipe.families.family import Model, Patches, Pool, complete
from vitscale.recipe.families.position import ROPE_BASES, Position
from vitscale.recipe.families.resnet import Blocks, ResNetShape, WidthFactor, feature_operations, small_stages
from vitscale.recipe.families.vit_shape import (
    BESIDE,
    DropPathRule,
    ViTShape,
    block_operations,
    map_operations,
    norm_parameters,
    shape_of,
)

_OF_PARTS = (
    *("norm", "norm_eps", "sub_norm", "mlp", "qkv_bias", "qk_norm", "layer_scale", "registers", "class_position"),
    *("distilled", "class_token"),
)
_OF_EMBEDDINGS = re.compile(r"(stem|embedding|cls|dist|registers|pos_embedding)(\.|$)")
_OF_BLOCK = re.compile(r"blocks\.(\d+)\.")
_TO_HEADS = re.compile(r"(attention\.qkv|map\.query|map\.key_value)\.(weight|bias)$")
_FROM_HEADS = re.compile(r"(attention|map)\.out\.weight$")


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
        *("DINOv2-S/14", "DINOv2-B/14", "DINOv2-L/14", "DINOv2-g/14"),
        *("DINOv3-S/16", "DINOv3-S+/16", "DINOv3-B/16", "DINOv3-L/16", "DINOv3-H+/16"),
        *("EVA02-Ti/14", "EVA02-S/14", "EVA02-B/14", "EVA02-L/14"),
    )
    dimensions: ClassVar[tuple[str, ...]] = (
        *("patch_size", "width", "depth", "mlp_dim", "num_heads", "attention"),
        *("blocks", "width_factor"),
        *_OF_PARTS,
    )
    optional: ClassVar[tuple[str, ...]] = (*_OF_PARTS, "drop_path", "drop_path_rule")

    patch_size: int | None = Field(None, ge=1, le=8192, description="side of a patch in pixels")
    width: int | None = Field(None, ge=1, le=2**17, description="width of a token")
    depth: int | None = Field(None, ge=1, le=1024, description="number of Transformer blocks")
    mlp_dim: int | None = Field(None, ge=1, le=2**19, description="size of the hidden layer of a block's MLP")
    num_heads: int | None = Field(None, ge=1, le=1024, description="attention heads per block; must divide the width")
    attention: Literal["full", "axial"] | None = None
    """axial: blocks with attention within rows, and blocks with attention within columns"""
    blocks: Blocks = None
    width_factor: WidthFactor = None
    norm: Literal["layer", "rms"] | None = Field(None, description="layer norm or RMS norm, default layer")
    norm_eps: float | None = Field(None, gt=0, lt=1)
    """epsilon that keeps norms from dividing by zero, default 1e-6 (DINOv3: 1e-5)"""
    sub_norm: Literal["none", "mlp", "all"] | None = None
    """an extra norm before the second layer of each MLP (mlp, as in EVA-02 B and L), or also before the output layer of
    attention (all, as in EVA-02 of CLIP); default none"""
    mlp: Literal["gelu", "exact_gelu", "quick_gelu", "swiglu"] | None = None
    """activation of an MLP's hidden layer; default gelu, in its tanh form; quick_gelu: x sigmoid(1.702 x), as in the
    first CLIP; swiglu: mlp_dim gates and as many values. Two thirds of gelu's mlp_dim give as many parameters; DINOv2 g
    rounds this number up to a multiple of 8, EVA-02 rounds it down"""
    qkv_bias: Literal["all", "no_key", "none"] | None = None
    """which of queries, keys and values have a bias: all, no_key (not the keys) or none; default all"""
    qk_norm: bool | None = Field(None, description="normalise the queries and keys of each head; default false")
    layer_scale: float | None = Field(None, gt=0, le=1)
    """initial value of a learned factor per channel after attention and MLP"""
    registers: int | None = Field(None, ge=0, le=1024)
    """learned tokens beside the class token, without positions; default 0"""
    class_position: bool | None = None
    """whether the class token has a position embedding, as patches do; default true"""
    distilled: bool | None = None
    """a distillation token beside the class token, and a head for each, as in DeiT; the model's output is the mean of
    both; default false"""
    class_token: bool | None = None
    """false: no class token with pool: normed_mean, as in timm's vit_*_gap models; default true"""
    pool: Pool | None = None
    """how tokens become one vector: the class token (cls), the mean of the patches (mean), attention with a learned
    query (map), or the final norm of the mean of the patches, in a model with a class token (normed_mean, as in
    EVA-02); default: cls, and mean with axial attention. Only cls and normed_mean have a class token"""
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations zeroed in training")
    drop_path: float = Field(0.0, ge=0, lt=1)
    """share of samples for which the last block's attention, and independently its MLP, is dropped in training"""
    drop_path_rule: DropPathRule = "growing"
    """how drop_path varies by depth: growing from 0 in the first block, or uniform, as in DeiT-III"""
    position: Position = Position()

    @model_validator(mode="before")
    @classmethod
    def _beside_the_shape(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        name = content.get("name")
        of_name = BESIDE.get(name.partition("-")[0], {}) if isinstance(name, str) else {}
        if content.get("distilled"):
            of_name = of_name | {"head": "linear"}
        return content | {key: value for key, value in of_name.items() if content.get(key) is None}

    def _contradictions(self) -> Iterator[str]:
        shape = self.shape()
        if shape.width % shape.num_heads:
            yield f"width {shape.width} does not divide into num_heads {shape.num_heads}"
        if shape.width % 2 and self.position.kind == "2d":
            yield f"position.kind 2d: width {shape.width} does not divide into an x and a y half"
        if self.position.kind == "sincos" and (shape.width % 4 or shape.width < 8):
            yield (
                f"position.kind sincos: width {shape.width} has to be a multiple of 4, at least 8, for sines and "
                "cosines by row and by column"
            )
        if self.drop_path_rule != "growing" and self.drop_path == 0:
            yield f"drop_path_rule: {self.drop_path_rule} belongs to drop_path, and that is 0"
        if shape.attention == "axial":
            yield from self._off_the_grid(shape)
        if self.position.kind in ROPE_BASES and shape.head_dim % 4:
            yield (
                f"position.kind {self.position.kind}: width / num_heads is {shape.head_dim}; it has to be a multiple "
                "of 4, for pairs by row and by column"
            )
        if (shape.registers or not shape.class_position) and (
            self.position.at != "stem" or self.position.kind == "relative"
        ):
            key = "registers" if shape.registers else "class_position"
            yield f"{key}: tokens without a position go with position.at: stem, and not with kind: relative"
        if self.position.registers_base is not None and not (
            shape.registers and math.isqrt(shape.registers) ** 2 == shape.registers
        ):
            yield f"position.registers_base: registers {shape.registers} are no square; give as many as 1, 4, 9 or 16"
        if shape.distilled:
            yield from self._against_distillation(shape)
        if not shape.class_token and self.pool_or_default() != "normed_mean":
            yield "class_token: false belongs to pool: normed_mean; cls needs one, and mean and map have none"

    def _against_distillation(self, shape: ViTShape) -> Iterator[str]:
        needed = {
            "head: linear": self.head == "linear",
            "pool: cls": self.pool_or_default() == "cls",
            "position: {kind: 1d, at: stem}": (self.position.kind, self.position.at) == ("1d", "stem"),
            "class_position: true": shape.class_position,
            "registers: 0": shape.registers == 0,
        }
        for key, is_so in needed.items():
            if not is_so:
                yield f"distilled: true, a class and a distillation token with a head each, needs {key}"

    def _off_the_grid(self, shape: ViTShape) -> Iterator[str]:
        if self.has_class_token:
            yield f"pool: {self.pool}: axial attention works on a grid, which has no class token; use pool: mean"
        refused = {
            "registers": shape.registers > 0,
            "drop_path": self.drop_path > 0,
            f"position.kind {self.position.kind}": self.position.kind in ROPE_BASES,
        }
        for key, is_set in refused.items():
            if is_set:
                yield f"{key}: axial attention, which works on a grid, does not have it; use attention: full"

    @classmethod
    def named(cls, name: str) -> ViTShape | None:
        """As `Model.named`: `ViT-L/16`, `R50+ViT-B/16`, `Axial-ViT-B/32`, `DINOv3-S/16`."""
        return shape_of(name)

    @classmethod
    def refusal(cls, key: str, value: Any, name: str | None) -> str:
        if key == "window":
            return f"window {value!r} belongs to a Swin, and {name or 'this'} attends to the whole image"
        return f"{key} belongs to ResNets; the stem of a hybrid is v1 with convolutions"

    def shape(self) -> ViTShape:
        named = None if self.name is None else self.named(self.name)
        given = self.given(self.dimensions)
        of_stem = {key: given.pop(key) for key in ("blocks", "width_factor") if key in given}
        if of_stem:
            stem = None if named is None else named.stem
            given["stem"] = complete(ResNetShape, stem, {"variant": "v1"} | of_stem)
        return complete(ViTShape, named, given)

    def describe_dimensions(self) -> str:
        shape = self.shape()
        stem = "" if shape.stem is None else f"R{list(shape.stem.blocks)}x{shape.stem.width_factor}+"
        return f"{stem}L{shape.depth} D{shape.width} MLP{shape.mlp_dim} /{shape.patch_size}"

    @property
    def kind(self) -> str:
        shape = self.shape()
        if shape.attention == "axial":
            return "axial"
        return "vit" if shape.stem is None else "hybrid"

    def facts(self) -> dict[str, Any]:
        of_training = ("rescale", "jitter")
        return super().facts() | {f"position.{key}": value for key, value in self.position if key not in of_training}

    def pool_or_default(self) -> Pool:
        return self.pool or ("mean" if self.shape().attention == "axial" else "cls")

    @property
    def has_class_token(self) -> bool:
        return has_class_token(self.pool_or_default()) and self.shape().class_token

    @property
    def representation_width(self) -> int:
        return self.shape().width

    def check_image_size(self, image_size: int) -> None:
        shape = self.shape()
        size, patch = shape.cut_size(image_size), shape.patch_size
        if size < patch:
            cut = "the image" if shape.stem is None else "the feature map"
            raise ValueError(f"{cut} of {size} x {size} is smaller than one patch of {patch} x {patch}")

    def check_several_sizes(self) -> None:
        """As `Model.check_several_sizes`: what a stem, axial attention or a block learns of positions has one size."""
        for key, is_set in {
            "blocks": self.shape().stem is not None,
            "attention: axial": self.shape().attention == "axial",
            f"position.kind: {self.position.kind}": self.position.kind == "relative",
            f"position.at: {self.position.at}": self.position.at == "every_layer",
        }.items():
            if is_set:
                raise ValueError(f"model.{key} takes images of one size")

    def describe_border(self, image_size: int) -> str | None:
        shape = self.shape()
        unseen, grid = shape.cut_size(image_size) % shape.patch_size, shape.grid(image_size)
        if unseen == 0:
            return None
        unit = "pixel" if shape.stem is None else "feature map step"
        amount = f"1 {unit} right and below is" if unseen == 1 else f"{unseen} {unit}s right and below are"
        return f"{image_size} x {image_size} pixels are {grid} x {grid} patches; {amount} not seen"

    def num_tokens(self, image_size: int) -> int:
        """T: the patches of a square image, the registers, and the class and distillation tokens, if there are any."""
        return self.shape().grid(image_size) ** 2 + self.extra_tokens

    @property
    def extra_tokens(self) -> int:
        shape = self.shape()
        return shape.registers + self.has_class_token + shape.distilled

    def patches(self, image_size: int) -> Patches | None:
        shape = self.shape()
        return Patches(shape.patch_size, shape.grid(image_size), shape.width) if shape.stem is None else None

    def operations(self, image_size: int, num_classes: int | None) -> Sequence[Operation]:
        """As `Model.operations`.

        Both matrix products of attention are called `scores`; the product with the embeddings of relative offsets is
        called `relative`. The number of heads makes no difference.
        """
        return self._operations(image_size, num_classes, self.shape().grid(image_size) ** 2)

    def operations_of_part(self, image_size: int, num_classes: int | None, patches: int) -> Sequence[Operation]:
        """As `Model.operations_of_part`; all patches are embedded before some are left out."""
        for key, is_set in {
            "attention: axial": self.shape().attention == "axial",
            f"position.kind: {self.position.kind}": self.position.kind == "relative",
            f"position.at: {self.position.at}": self.position.at != "stem",
        }.items():
            if is_set:
                raise ValueError(f"model.{key} needs all patches of an image, in their places")
        return self._operations(image_size, num_classes, patches)

    def _operations(self, image_size: int, num_classes: int | None, patches: int) -> list[Operation]:
        shape = self.shape()
        D, n = shape.width, shape.grid(image_size)
        T = patches + shape.registers + self.has_class_token + shape.distilled
        operations = [] if shape.stem is None else feature_operations(shape.stem, image_size)
        operations.append(dense("patch_embedding", n**2, shape.patch_dim, D, input_gradient=shape.stem is not None))
        class_token = D if self.has_class_token else 0
        if class_token:
            operations.append(parameters("class_token", class_token))
        if shape.distilled:
            operations.append(parameters("distillation_token", D))
        if shape.registers:
            operations.append(parameters("registers", shape.registers * D))
        if self.position.kind in ("1d", "2d", "1d_rope"):
            of_class = class_token + shape.distilled * D if shape.class_position else 0
            once = (2 * n * (D // 2) if self.position.kind == "2d" else n**2 * D) + of_class
            operations.append(parameters("positions", once * (shape.depth if self.position.at == "every_layer" else 1)))
        relative = self.position.kind == "relative"
        if shape.attention == "axial":
            block = 2 * block_operations(shape, sequences=n, T=n, relative=relative)
        else:
            block = block_operations(shape, sequences=1, T=T, relative=relative)
        for index in range(shape.depth):
            # A block ends with its MLP's output. The backward pass needs that only for a mask drawn after it, or for
            # the gradient of a layer scale.
            draws = self.dropout > 0 or shape.drop_path_of(index, self.drop_path, self.drop_path_rule) > 0
            operations += block_of(block, index, needs_output=draws or shape.layer_scale is not None)
        operations.append(parameters("norms", norm_parameters(shape, D)))
        if self.pool_or_default() == "map":
            operations += map_operations(shape, T)
        if num_classes is not None:
            if self.head == "pretrain":
                operations.append(dense("pre_logits", 1, D, D))
            operations += [dense("head", 1, D, num_classes)] * (2 if shape.distilled else 1)
        return operations

    @property
    def num_blocks(self) -> int:
        return self.shape().depth

    def with_blocks(self, count: int) -> Self:
        return self.model_copy(update={"depth": count})

    def layers_above(self, parameter: str) -> int:
        """As `Model.layers_above`: d - i for block i (from 0) of d, d + 1 for the embeddings and the stem, else 0."""
        if block := _OF_BLOCK.match(parameter):
            return self.num_blocks - int(block[1])
        return self.num_blocks + 1 if _OF_EMBEDDINGS.match(parameter) else 0

    def axes(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As `Model.axes`: query, key, value stacked, each (H, d, D) or (H, d); out (D, H, d); patches (D, P, P, C)."""
        own = self.shape()
        if parameter == "embedding.weight":
            return (shape[0], own.patch_size, own.patch_size, shape[1] // own.patch_size**2)
        return axes_by_head(own, parameter, shape)

    @property
    def has_attention_bias(self) -> bool:
        return self.position.kind == "relative"

    @property
    def draws(self) -> bool:
        return self.dropout > 0

    def small(self) -> tuple[dict[str, Any], int]:
        """As `Model.small`; images have 64 pixels a side, or the first larger power of two that holds a patch."""
        shape, size = self.shape(), 64
        small = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
        if shape.stem is not None:
            small |= small_stages(shape.stem)
        while shape.grid(size) == 0:
            size *= 2
        return small, size


def axes_by_head(of_model: ViTShape, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter of Transformer blocks with an axis for the heads of attention."""
    if _TO_HEADS.search(parameter):
        return (shape[0] // of_model.width, of_model.num_heads, of_model.head_dim, *shape[1:])
    return (shape[0], of_model.num_heads, of_model.head_dim) if _FROM_HEADS.search(parameter) else shape


def has_class_token(pool: Pool) -> bool:
    """Whether a Transformer with this pooling has a class token."""
    return pool in ("cls", "normed_mean")
