"""The conversion rules of the Vision Transformers and their hybrids."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, cat

from vitscale.ground.errors import CheckpointError
from vitscale.ground.weight_formats import Format
from vitscale.models.layers import CHANNELS
from vitscale.models.resnet.weights import flax_stem, timm_features
from vitscale.models.vit import dino, eva
from vitscale.models.vit.positions import SincosTable, resample_positions, sincos_positions
from vitscale.models.weights.foreign import Backbone, ForeignWeights, Resampling, TimmModel
from vitscale.models.weights.huggingface import ACTIVATIONS
from vitscale.models.weights.rules import (
    Rule,
    flax_attention,
    flax_dense,
    flax_heads,
    flax_norm,
    flax_out,
    flax_patches,
    renamed,
    same,
    stacked,
    torch_patches,
)
from vitscale.models.weights.timm_hub import mlp_ratio
from vitscale.recipe import families
from vitscale.recipe.families import ResNetShape, ViTShape

if TYPE_CHECKING:
    from vitscale.models.vit.model import ViT


_POOLS: dict[str, dict[str, Any]] = {
    "cls": {},
    "mean": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "normed_mean": {"global_pool": "avg", "fc_norm": True},
    "map": {"global_pool": "map", "class_token": False},
}
_ROUNDED = 2.0**-8  # in bf16, of sines and cosines
_TIMM_GELU = {"gelu": "gelu_tanh", "exact_gelu": "gelu", "quick_gelu": "quick_gelu"}
_TIMM_GATED = {"vit_giant_patch14_reg4_dinov2": (14, 1536, 40, 24)}
# timm's name -> blocks of the stem, and the dimensions that the name stands for. Others can be given as arguments.
_TIMM_MODELS: dict[str, tuple[tuple[int, ...] | None, eva.Dimensions]] = {
    "vit_tiny_patch16_224": (None, (16, 192, 12, 3)),
    "vit_small_patch32_224": (None, (32, 384, 12, 6)),
    "vit_small_patch16_224": (None, (16, 384, 12, 6)),
    "vit_base_patch32_224": (None, (32, 768, 12, 12)),
    "vit_base_patch16_224": (None, (16, 768, 12, 12)),
    "vit_base_patch8_224": (None, (8, 768, 12, 12)),
    "vit_large_patch32_224": (None, (32, 1024, 24, 16)),
    "vit_large_patch16_224": (None, (16, 1024, 24, 16)),
    "vit_huge_patch14_224": (None, (14, 1280, 32, 16)),
    "vit_tiny_r_s16_p8_224": ((), (8, 192, 12, 3)),
    "vit_small_r26_s32_224": ((2, 2, 2, 2), (1, 384, 12, 6)),
    "vit_base_r26_s32_224": ((2, 2, 2, 2), (1, 768, 12, 12)),
    "vit_base_r50_s16_224": ((3, 4, 9), (1, 768, 12, 12)),
    "vit_large_r50_s32_224": ((3, 4, 6, 3), (1, 1024, 24, 16)),
}
# These are used under their exact names: with a distillation token timm has another class.
_TIMM_DISTILLED: dict[str, tuple[tuple[int, ...] | None, eva.Dimensions]] = {
    "deit_tiny_distilled_patch16_224": (None, (16, 192, 12, 3)),
    "deit_small_distilled_patch16_224": (None, (16, 384, 12, 6)),
    "deit_base_distilled_patch16_224": (None, (16, 768, 12, 12)),
}
_HF_DIMENSIONS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "patch_size": "patch_size",
}


_PLAIN = {field.name: field.default for field in fields(ViTShape) if field.name in families.ViT.optional}


# Our names and timm's, of layers and of parameters.
_IN_BLOCK = (
    *(("norm1", "norm1"), ("norm2", "norm2"), ("attention.qkv", "attn.qkv"), ("attention.out", "attn.proj")),
    *(("attention.query_norm", "attn.q_norm"), ("attention.key_norm", "attn.k_norm")),
    *(("attention.norm", "attn.norm"), ("layer_scale1", "ls1.gamma"), ("layer_scale2", "ls2.gamma")),
    *(("mlp.fc1", "mlp.fc1"), ("mlp.norm", "mlp.norm"), ("mlp.fc2", "mlp.fc2")),
)
_IN_MAP = (
    *(("probe", "latent"), ("query", "q"), ("key_value", "kv"), ("out", "proj"), ("norm", "norm")),
    *(("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")),
)


class ViTWeights(ForeignWeights):
    """As `ForeignWeights`, of a Vision Transformer or a hybrid."""

    def __init__(self, model: "ViT") -> None:
        self._model = model

    def refusal(self, form: Format) -> str | None:
        model = self._model
        if form == "hf" and dino.model_type(model) is not None:
            return None
        if model.shape.attention == "axial":
            return f"{form} holds Transformers with global attention, not axial attention; use safetensors"
        if form == "timm" and model.position == eva.POSITION:
            if parts := eva.other_parts(model):
                named = ", ".join(parts)
                return f"timm holds 1d positions and rotations of EVA-02 alone, with other {named}; use safetensors"
            return None
        if model.position not in ("1d", "sincos") or model.position_at != "stem":
            own = f"kind: {model.position} at: {model.position_at}"
            return f"{form} holds 1d and sincos position embeddings at the stem, and this has {own}; use safetensors"
        if form == "npz" and (table := model.position_table) != "big_vision":
            theirs = f"its readers use those of big_vision, not of {table}"
            return f"npz holds no positions of sincos, and {theirs}; use safetensors"
        if parts := _parts_without_place(model, form):
            return f"{form} holds no Transformers with {', '.join(parts)}; use safetensors"
        if form == "hf" and model.shape.stem is not None:
            return "hf holds Vision Transformers without a ResNet before them; use timm or npz"
        if form == "hf" and model.cls is None:
            return "hf holds Vision Transformers with a class token, and this one pools the mean; use timm or npz"
        return None

    def rules(self, form: Format) -> list[Rule]:
        if form == "hf" and (kind := dino.model_type(self._model)) is not None:
            return list(dino.rules(self._model, kind))
        of_timm = eva.rules if self._model.position == eva.POSITION else _timm
        return list({"npz": _flax, "timm": of_timm, "hf": _transformers}[form](self._model))

    def resampling(self, name: str, shape: tuple[int, ...], form: Format) -> Resampling | None:
        """As `ForeignWeights.resampling`: of position embeddings (section 3.2), DINOv2's by its own rule."""
        model, last = self._model, name.rpartition(".")[2]
        if "pos_embedding" not in name or last == "cls":
            return None
        grid, width = model.shape.grid(model.image_size), model.shape.width
        if last in ("x", "y"):  # one axis of a 2d table: (rows, D / 2)
            if len(shape) != 2 or shape[1] != width // 2 or shape[0] in (0, grid):
                return None
            old, new = (shape[0], 1), (grid, 1)
            return Resampling(old, new, lambda value: resample_positions(value[None], old, new, False)[0])
        class_token = ((model.cls is not None) + model.shape.distilled) * model.shape.class_position
        if len(shape) != 3 or (shape[0], shape[2]) != (1, width) or shape[1] <= class_token:
            return None
        count = shape[1] - class_token
        if self._deit_register and math.isqrt(count) ** 2 != count:
            count -= 1  # the row of the distillation token, in transformers' files alone
        side = math.isqrt(count)
        if side**2 != count or side == grid:
            return None
        old, new = (side, side), (grid, grid)
        if form == "hf" and dino.model_type(model) in dino.DINOV2:
            antialias = model.shape.registers > 0
            return Resampling(old, new, lambda value: dino.resample_positions(value, side, grid, antialias=antialias))
        return Resampling(old, new, lambda value: resample_positions(value, old, new, class_token))

    def timm(self) -> TimmModel | None:
        shape, stem = self._model.shape, self._model.shape.stem
        blocks = None if stem is None else stem.blocks
        if self.refusal("timm") is None and self._model.position == eva.POSITION:
            return eva.timm(self._model)
        if self.refusal("timm") is not None or (stem is not None and stem != ResNetShape(stem.blocks, variant="v1")):
            return None
        models = _TIMM_DISTILLED if shape.distilled else _TIMM_MODELS
        alike = {name: named for name, (named_blocks, named) in models.items() if named_blocks == blocks}
        if shape.mlp == "swiglu":  # no argument in a file chooses it: only this name does
            alike = _TIMM_GATED if stem is None else {}
        if not alike:
            return None
        name, dimensions = eva.nearest(shape, alike)
        arguments: dict[str, Any] = {"img_size": self._model.image_size, **dimensions}
        if shape.fc1_dim != 4 * shape.width or shape.mlp == "swiglu":
            arguments["mlp_ratio"] = mlp_ratio(shape.width, shape.fc1_dim)
        pool = _POOLS[self._model.pool]
        return TimmModel(
            name,
            arguments | self._timm_parts() | pool,
            {"num_features": shape.width, "global_pool": pool.get("global_pool", "token")},
            {
                "first_conv": "patch_embed.proj" if stem is None else "patch_embed.backbone.stem.conv",
                "classifier": ["head", "head_dist"] if shape.distilled else "head",
            },
            fixed_size=True,
        )

    def _timm_parts(self) -> dict[str, Any]:
        """timm's arguments for what differs from the paper's models, and from the model that a name stands for."""
        shape = self._model.shape
        arguments: dict[str, Any] = {}
        if shape.mlp == "swiglu" or shape.registers or not shape.class_position:
            arguments |= {"reg_tokens": shape.registers}
            arguments |= {"no_embed_class": bool(shape.registers or not shape.class_position)}
        if shape.mlp == "swiglu" or shape.layer_scale is not None:
            arguments["init_values"] = shape.layer_scale
        if shape.mlp != "swiglu":
            arguments["act_layer"] = _TIMM_GELU[shape.mlp]
        if not shape.class_token:
            arguments["class_token"] = False
        if shape.norm == "rms":
            arguments["norm_layer"] = "rmsnorm"
        if shape.qk_norm:
            arguments["qk_norm"] = True
        if shape.qkv_bias == "none":
            arguments["qkv_bias"] = False
        if shape.sub_norm != "none":
            arguments |= {"scale_mlp_norm": True, "scale_attn_norm": shape.sub_norm == "all"}
        return arguments

    @property
    def _deit_register(self) -> bool:
        """Whether it is transformers' DeiT whose distillation token has no head."""
        model, shape = self._model, self._model.shape
        return shape.registers == 1 and shape.class_position and shape.layer_scale is None and model.pool == "cls"

    def backbone(self) -> Backbone:
        from vitscale.models.vit.backbones import backbone  # it has rules of this file

        return backbone(self._model)

    def transformers_config(self) -> dict[str, Any]:
        """As `ForeignWeights.transformers_config`; the image size is the part that whole patches cover."""
        shape = self._model.shape
        image_size = shape.grid(self._model.image_size) * shape.patch_size
        if (kind := dino.model_type(self._model)) is not None:
            of_kind = {"architectures": [dino.ARCHITECTURES[kind]], "layerscale_value": shape.layer_scale}
            return of_kind | dino.configuration(self._model, kind) | {"image_size": image_size}
        architecture = "ViTForImageClassification"
        if shape.distilled or self._deit_register:
            architecture = f"DeiTForImageClassification{'WithTeacher' if shape.distilled else ''}"
        return {
            "architectures": [architecture],
            "model_type": "vit" if architecture.startswith("ViT") else "deit",
            **{key: getattr(shape, ours) for key, ours in _HF_DIMENSIONS.items()},
            "hidden_act": ACTIVATIONS[shape.mlp],
            "layer_norm_eps": shape.norm_eps,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "image_size": image_size,
            "num_channels": CHANNELS,
            "qkv_bias": True,
        }


def _parts_without_place(model: "ViT", form: Format) -> list[str]:
    """The parts, as a recipe names them, that the paper's models do not have and a format cannot hold."""
    shape, has_map = model.shape, model.pool == "map"
    found = [key for key, plain in _PLAIN.items() if getattr(shape, key) != plain]
    if model.pool in ("map", "normed_mean"):
        found.append(f"pool: {model.pool}")
    if form == "hf":
        held = {"norm_eps": True, "mlp": shape.mlp != "swiglu", "distilled": True, "registers": shape.registers == 1}
        return [key for key in found if not held.get(key, False)]
    if form == "npz":
        return [key for key in found if key != "pool: map"]
    refused = {
        "norm_eps": True,
        "qkv_bias": shape.qkv_bias == "no_key",
        "registers": model.cls is not None and shape.class_position,
        "mlp": has_map and shape.mlp == "swiglu",
        "sub_norm": has_map,
    }
    said = {
        "registers": "registers beside a class token with a position (class_position: false: it is part of the token)"
    }
    return [said.get(key, key) for key in found if refused.get(key, False)]


def _flax(model: "ViT") -> Iterator[Rule]:
    if model.stem is not None:
        yield from flax_stem(model.stem, "stem.")
    yield from flax_patches("embedding", "embedding", model.shape.patch_size)
    if model.cls is not None:
        yield same("cls", "cls")
    if model.pos_embedding is not None:
        yield same("pos_embedding", "Transformer/posembed_input/pos_embedding")
    for i in range(model.shape.depth):
        ours, theirs = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        yield from flax_norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        yield from flax_attention(f"{ours}.attention", attention, model.shape.num_heads)
        yield from flax_norm(f"{ours}.norm2", f"{theirs}/LayerNorm_2")
        yield from flax_dense(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_3/Dense_0")
        yield from flax_dense(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_3/Dense_1")
    yield from flax_norm("norm", "Transformer/encoder_norm")
    if model.map is not None:
        yield from _flax_map(model.shape.num_heads)
    if model.pre_logits is not None:
        yield from flax_dense("pre_logits", "pre_logits")
    yield from flax_dense("head", "head")


def _flax_map(num_heads: int) -> Iterator[Rule]:
    """The rules of attention pooling, by big_vision's names: the paper's authors have no such pooling."""
    ours, theirs = "map", "MAPHead_0"
    attention = f"{theirs}/MultiHeadDotProductAttention_0"
    yield same(f"{ours}.probe", f"{theirs}/probe")
    yield from flax_heads(f"{ours}.query", [f"{attention}/query"], num_heads)
    yield from flax_heads(f"{ours}.key_value", [f"{attention}/key", f"{attention}/value"], num_heads)
    yield from flax_out(f"{ours}.out", f"{attention}/out", num_heads)
    yield from flax_norm(f"{ours}.norm", f"{theirs}/LayerNorm_0")
    yield from flax_dense(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_0/Dense_0")
    yield from flax_dense(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_0/Dense_1")


def patches_and_fixed_positions(model: "ViT", theirs: str, positions: str, first: int) -> list[Rule]:
    """The rules of the patch embedding, and of `positions` with `first` tokens before the patches if they are fixed."""
    weight, bias = torch_patches("embedding", theirs, model.shape.patch_size)
    if model.position != "sincos":
        return [weight, bias]
    grid = model.shape.grid(model.image_size)
    return [weight, with_fixed_positions(bias, positions, first, grid, model.shape.width, model.position_table)]


def with_fixed_positions(bias: Rule, positions: str, first: int, grid: int, width: int, table: SincosTable) -> Rule:
    """The rule of a layer's bias in formats that also hold `positions`, which are fixed, hence no parameter here.

    They are written as the table after `first` rows of zeros; those that are read have to be the same.
    """

    def values() -> Tensor:
        return cat([torch.zeros(1, first, width), sincos_positions(grid, width, torch.empty(0), table)], 1)

    def join(read: tuple[Tensor, ...]) -> Tensor:
        if not torch.allclose(read[1], values(), rtol=0, atol=_ROUNDED):
            raise CheckpointError(
                f"{positions} in the weights are not the fixed positions of model.position: {{kind: sincos, table: "
                f"{table}}}; if they were learned, use kind: 1d"
            )
        return read[0]

    return Rule(bias.ours, (*bias.theirs, positions), lambda value: (value, values()), join, compares=True)


def _timm(model: "ViT") -> Iterator[Rule]:
    if model.stem is not None:
        yield from timm_features(model.stem, "stem.", "patch_embed.backbone.")
    first = (model.cls is not None) * model.shape.class_position
    yield from patches_and_fixed_positions(model, "patch_embed.proj", "pos_embed", first)
    if model.cls is not None:
        yield same("cls", "cls_token")
    if model.dist is not None:
        yield same("dist", "dist_token")
    if model.pos_embedding is not None:
        yield same("pos_embedding", "pos_embed")
    renames = {f"blocks.{i}.{ours}": f"blocks.{i}.{timm}" for i in range(model.shape.depth) for ours, timm in _IN_BLOCK}
    renames |= {"registers": "reg_token", "norm": "fc_norm" if model.pool == "normed_mean" else "norm"}
    renames |= {"head": "head", "head_dist": "head_dist"}
    renames |= {f"map.{ours}": f"attn_pool.{timm}" for ours, timm in _IN_MAP}
    for name, _ in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if name in renames:
            yield same(name, renames[name])
        elif layer in renames:
            yield same(name, f"{renames[layer]}.{kind}")


def _transformers(model: "ViT") -> Iterator[Rule]:
    """The rules, by the names that transformers 4 and 5 both read and write."""
    shape = model.shape
    name = "deit" if shape.distilled or shape.registers else "vit"
    yield same("cls", f"{name}.embeddings.cls_token")
    if name == "deit":
        yield same("dist" if shape.distilled else "registers", "deit.embeddings.distillation_token")
    positions = f"{name}.embeddings.position_embeddings"
    rule = same("pos_embedding", positions)
    if shape.registers:  # which have no position
        rule = replace(
            rule,
            split=lambda value: (cat([value[:, :1], torch.zeros_like(value[:, :1]), value[:, 1:]], 1),),
            join=lambda values: cat([values[0][:, :1], values[0][:, 2:]], 1),
            renames=False,
        )
    if model.pos_embedding is not None:
        yield rule
    patches = f"{name}.embeddings.patch_embeddings.projection"
    yield from patches_and_fixed_positions(model, patches, positions, 1 + shape.registers)
    for i in range(shape.depth):
        yield from _transformers_block(f"blocks.{i}", f"{name}.encoder.layer.{i}")
    yield from renamed("norm", f"{name}.layernorm")
    yield from renamed("head", "cls_classifier" if shape.distilled else "classifier")
    if shape.distilled:
        yield from renamed("head_dist", "distillation_classifier")


def _transformers_block(ours: str, theirs: str) -> Iterator[Rule]:
    attention = f"{theirs}.attention.attention"
    yield from renamed(f"{ours}.norm1", f"{theirs}.layernorm_before")
    yield from stacked(f"{ours}.attention.qkv", [f"{attention}.{part}" for part in ("query", "key", "value")])
    yield from renamed(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
    yield from renamed(f"{ours}.norm2", f"{theirs}.layernorm_after")
    yield from renamed(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense")
    yield from renamed(f"{ours}.mlp.fc2", f"{theirs}.output.dense")


def decoder_rules(form: Format, shape: ViTShape, grid: int) -> Iterator[Rule]:
    """The rules of the mask token and the decoder of an MAE, with blocks of `shape` over a grid x grid of patches.

    In timm's format they have the names that the authors of MAE use, whose encoder has timm's.
    """
    prefix = "decoder." if form == "hf" else ""
    yield same("mask", f"{prefix}mask_token")
    weight, bias = renamed("decoder.embedding", f"{prefix}decoder_embed")
    yield weight
    yield with_fixed_positions(bias, f"{prefix}decoder_pos_embed", 1, grid, shape.width, "mae")
    for i in range(shape.depth):
        ours = f"decoder.blocks.{i}"
        if form == "hf":
            yield from _transformers_block(ours, f"decoder.decoder_layers.{i}")
        else:
            for layer in ("norm1", "norm2", "attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2"):
                yield from renamed(f"{ours}.{layer}", f"decoder_blocks.{i}.{dict(_IN_BLOCK)[layer]}")
    yield from renamed("decoder.norm", f"{prefix}decoder_norm")
    yield from renamed("decoder.prediction", f"{prefix}decoder_pred")
