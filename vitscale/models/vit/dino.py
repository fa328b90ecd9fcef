"""DINOv2, with and without registers, and DINOv3 in transformers' format: their configurations and names.

All end with the tokens: there is no place for a head. Their mask token belongs to an objective, which is no part of a
model here: only a run that continues from them reads it, and it is written as zeros.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitscale.models.layers import CHANNELS
from vitscale.models.weights.huggingface import ACTIVATIONS
from vitscale.models.weights.rules import Rule, renamed, same, stacked, torch_patches, with_constant

if TYPE_CHECKING:
    from vitscale.models.vit.model import ViT
    from vitscale.recipe.families import ViTShape

DINOV2, DINOV3 = ("dinov2", "dinov2_with_registers"), "dinov3_vit"
ARCHITECTURES = dict(zip((*DINOV2, DINOV3), ("Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel"), strict=True))
_LARGEST_RATIO = 64
_MASK = "embeddings.mask_token"


def model_type(model: "ViT") -> str | None:
    """The model_type in transformers of a model with these parts; None if it is none of the three."""
    shape = model.shape
    is_one = (
        (shape.attention, shape.stem, shape.norm, shape.qk_norm, model.pool) == ("full", None, "layer", False, "cls")
        and shape.sub_norm == "none"
        and shape.layer_scale is not None
        and not shape.distilled
    )
    if not is_one:
        return None
    if model.position == "rope":
        return DINOV3
    has_positions = (model.position, model.position_at, shape.class_position) == ("1d", "stem", True)
    if not has_positions or shape.qkv_bias == "no_key" or mlp_ratio(shape) is None:
        return None
    return DINOV2[shape.registers > 0]


def mlp_ratio(shape: "ViTShape") -> int | None:
    """The whole number that gives the hidden layer's size in DINOv2's configuration; None if there is none."""
    ratios = range(1, _LARGEST_RATIO + 1)
    return next((ratio for ratio in ratios if mlp_dim(shape.width, ratio, shape.mlp) == shape.mlp_dim), None)


def mlp_dim(width: int, ratio: int, mlp: str) -> int:
    """The hidden layer's size in DINOv2."""
    return (int(width * ratio * 2 / 3) + 7) // 8 * 8 if mlp == "swiglu" else width * ratio


def configuration(model: "ViT", kind: str) -> dict[str, Any]:
    """What config.json says about a model as this model_type, as far as it decides what the model computes."""
    shape = model.shape
    is_gated = shape.mlp == "swiglu"
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.num_heads,
        "patch_size": shape.patch_size,
        "layer_norm_eps": shape.norm_eps,
        "num_channels": CHANNELS,
    }
    if kind != DINOV2[0]:
        config["num_register_tokens"] = shape.registers
    if kind in DINOV2:
        config |= {"mlp_ratio": mlp_ratio(shape), "use_swiglu_ffn": is_gated, "qkv_bias": shape.qkv_bias == "all"}
        return config if is_gated else config | {"hidden_act": ACTIVATIONS[shape.mlp]}
    return config | {
        "intermediate_size": shape.mlp_dim,
        "use_gated_mlp": is_gated,
        "hidden_act": ACTIVATIONS[shape.mlp],
        "rope_theta": model.position_base,
        "query_bias": shape.qkv_bias != "none",
        "key_bias": shape.qkv_bias == "all",
        "value_bias": shape.qkv_bias != "none",
        "proj_bias": True,
        "mlp_bias": True,
    }


def resample_positions(positions_1TD: Tensor, old: int, new: int, *, antialias: bool) -> Tensor:
    """DINOv2's position embeddings, that of the class token first, of old x old patches for new x new: (1, T', D).

    As in its authors' code: bicubic, antialiased in models with registers, in others by a factor of (new + 0.1) / old.
    """
    planes = positions_1TD[:, 1:].view(1, old, old, -1).permute(0, 3, 1, 2).float()
    if antialias:
        planes = F.interpolate(planes, size=(new, new), mode="bicubic", antialias=True)
    else:
        planes = F.interpolate(planes, scale_factor=((new + 0.1) / old,) * 2, mode="bicubic")
    patches = planes.flatten(2).transpose(1, 2).to(positions_1TD.dtype)
    return torch.cat([positions_1TD[:, :1], patches], dim=1)


def rules(model: "ViT", kind: str) -> Iterator[Rule]:
    """All parameters but the head's, by transformers' names for this model_type; absent layer scales are ones."""
    shape, is_v2 = model.shape, kind in DINOV2
    patches = "embeddings.patch_embeddings.projection" if is_v2 else "embeddings.patch_embeddings"
    yield Rule(
        "cls",
        ("embeddings.cls_token", _MASK),
        lambda value: (value, torch.zeros_like(value[0] if is_v2 else value)),
        lambda values: values[0],
    )
    if shape.registers:
        yield same("registers", "embeddings.register_tokens")
    if is_v2:
        yield same("pos_embedding", "embeddings.position_embeddings")
    yield from torch_patches("embedding", patches, shape.patch_size)
    for i in range(shape.depth):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}" if is_v2 else f"layer.{i}"
        yield from _attention(model, f"{ours}.attention", f"{theirs}.attention", is_v2)
        yield from _mlp(model, f"{ours}.mlp", f"{theirs}.mlp", is_v2)
        for part in (1, 2):
            weight, bias = renamed(f"{ours}.norm{part}", f"{theirs}.norm{part}")
            scale = f"{theirs}.layer_scale{part}.lambda1"
            yield with_constant(weight, scale, 1.0) if shape.layer_scale is None else weight
            yield bias
            if shape.layer_scale is not None:
                yield same(f"{ours}.layer_scale{part}", scale)
    yield from renamed("norm", "layernorm" if is_v2 else "norm")


def mask_rule(ours: str, kind: str, theirs: str = _MASK) -> Rule:
    """Our mask (1, 1, D) and theirs, (1, D) in DINOv2, in files of this model_type."""
    is_v2 = kind in DINOV2
    return Rule(ours, (theirs,), lambda value: (value[0] if is_v2 else value,), lambda values: values[0].view(1, 1, -1))


def _attention(model: "ViT", ours: str, theirs: str, is_v2: bool) -> Iterator[Rule]:
    names = [f"{theirs}.attention.{part}" for part in ("query", "key", "value")]
    if not is_v2:
        names = [f"{theirs}.{part}_proj" for part in ("q", "k", "v")]
    biases = model.shape.qkv_bias
    yield from stacked(f"{ours}.qkv", names, ("weight", "bias") if biases == "all" else ("weight",))
    if biases == "no_key":
        yield same(f"{ours}.query_bias", f"{names[0]}.bias")
        yield same(f"{ours}.value_bias", f"{names[2]}.bias")
    yield from renamed(f"{ours}.out", f"{theirs}.output.dense" if is_v2 else f"{theirs}.o_proj")


def _mlp(model: "ViT", ours: str, theirs: str, is_v2: bool) -> Iterator[Rule]:
    is_gated = model.shape.mlp == "swiglu"
    if is_v2:
        first, second = ("weights_in", "weights_out") if is_gated else ("fc1", "fc2")
        yield from renamed(f"{ours}.fc1", f"{theirs}.{first}")
        yield from renamed(f"{ours}.fc2", f"{theirs}.{second}")
        return
    if is_gated:
        yield from stacked(f"{ours}.fc1", [f"{theirs}.gate_proj", f"{theirs}.up_proj"])
    else:
        yield from renamed(f"{ours}.fc1", f"{theirs}.up_proj")
    yield from renamed(f"{ours}.fc2", f"{theirs}.down_proj")
