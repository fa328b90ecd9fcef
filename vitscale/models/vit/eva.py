"""EVA-02 in timm's format: which models it has, their names, arguments and parameters.

timm rotates neighbouring elements of queries and keys together, ours are half a head apart: the rows that compute them
are in another order. Models with inner norms have separate layers where the others have stacked ones.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, cat

from vitscale.models.weights.foreign import TimmModel
from vitscale.models.weights.rules import Rule, renamed, same, stacked, torch_patches
from vitscale.models.weights.source import Source, contradicted
from vitscale.models.weights.timm_hub import check_arguments, mlp_ratio

if TYPE_CHECKING:
    from vitscale.models.vit.model import ViT
    from vitscale.recipe.families import ViTShape

POSITION = "1d_rope"
Dimensions = tuple[int, int, int, int]  # patch size, width, depth and heads
_BASE, _GRID, _RATIO = 10_000.0, [16, 16], 4 * 2 / 3  # timm's
# Name without the image size -> norms inside, and dimensions.
_MODELS: dict[str, tuple[str, Dimensions]] = {
    "eva02_tiny_patch14": ("none", (14, 192, 12, 3)),
    "eva02_small_patch14": ("none", (14, 384, 12, 6)),
    "eva02_base_patch14": ("mlp", (14, 768, 12, 12)),
    "eva02_large_patch14": ("mlp", (14, 1024, 24, 16)),
    "eva02_base_patch16_clip": ("all", (16, 768, 12, 12)),
    "eva02_large_patch14_clip": ("all", (14, 1024, 24, 16)),
}
# Arguments of timm's that show in the tensors or are read here; and others, with the values that we compute.
_SEEN = {
    *("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "global_pool", "norm_layer", "rope_temperature"),
    *("qkv_bias", "qkv_fused", "qk_norm", "swiglu_mlp", "swiglu_align_to", "scale_mlp", "scale_attn_inner"),
    *("init_values", "attn_only_layer_scale", "class_token", "num_reg_tokens", "no_embed_class", "use_abs_pos_emb"),
    *("use_pre_transformer_norm", "use_post_transformer_norm", "use_fc_norm", "ref_feat_shape", "rope_jitter_coords"),
}
_TAKEN: dict[str, tuple[Any, ...]] = {
    **{"use_rot_pos_emb": (True,), "use_post_norm": (False,), "attn_type": ("eva",), "rope_type": ("cat",)},
    **{"rope_grid_offset": (0,), "rope_grid_indexing": ("ij",), "rope_rotate_half": (False,)},
}
_POOLS = {"normed_mean": "avg", "cls": "token"}
# What timm has no argument for, or none here.
_FIXED: dict[str, Any] = {
    **{"attention": "full", "stem": None, "norm": "layer", "norm_eps": 1e-6, "mlp": "swiglu", "qkv_bias": "no_key"},
    **{"qk_norm": False, "layer_scale": None, "registers": 0, "class_position": True, "class_token": True},
}


def other_parts(model: "ViT") -> list[str]:
    """The parts, as a recipe names them, in which a model with EVA-02's positions is not an EVA-02."""
    parts = [key for key, value in _FIXED.items() if getattr(model.shape, key) != value]
    if model.position_unit != "image":
        parts.append(f"position.unit: {model.position_unit}")
    return parts if model.pool in _POOLS else [*parts, f"pool: {model.pool}"]


def rules(model: "ViT") -> Iterator[Rule]:
    """Every parameter, by the names in timm's files."""
    shape = model.shape
    yield from torch_patches("embedding", "patch_embed.proj", shape.patch_size)
    yield same("cls", "cls_token")
    yield same("pos_embedding", "pos_embed")
    for block in (f"blocks.{i}" for i in range(shape.depth)):
        yield from renamed(f"{block}.norm1", f"{block}.norm1")
        yield from _attention(shape, f"{block}.attention", f"{block}.attn")
        yield from renamed(f"{block}.norm2", f"{block}.norm2")
        if shape.sub_norm == "none":
            yield from renamed(f"{block}.mlp.fc1", f"{block}.mlp.fc1")
        else:
            yield from stacked(f"{block}.mlp.fc1", [f"{block}.mlp.fc1_g", f"{block}.mlp.fc1_x"])
            yield from renamed(f"{block}.mlp.norm", f"{block}.mlp.norm")
        yield from renamed(f"{block}.mlp.fc2", f"{block}.mlp.fc2")
    yield from renamed("norm", "fc_norm" if model.pool == "normed_mean" else "norm")
    if model.head is not None:
        yield from renamed("head", "head")


def _attention(shape: "ViTShape", ours: str, theirs: str) -> Iterator[Rule]:
    heads, is_stacked = shape.num_heads, shape.sub_norm == "none"
    q, k, v = (f"{theirs}.{part}_proj" for part in "qkv")

    def split(value: Tensor) -> tuple[Tensor, ...]:
        query, key, others = value.chunk(3)
        parts = (_neighbours(query, heads), _neighbours(key, heads), others)
        return (cat(parts),) if is_stacked else parts

    def join(values: tuple[Tensor, ...]) -> Tensor:
        query, key, others = values[0].chunk(3) if is_stacked else values
        return cat([_halves(query, heads), _halves(key, heads), others])

    weights = (f"{theirs}.qkv.weight",) if is_stacked else (f"{q}.weight", f"{k}.weight", f"{v}.weight")
    yield Rule(f"{ours}.qkv.weight", weights, split, join)
    yield Rule(
        f"{ours}.query_bias",
        (f"{theirs}.q_bias" if is_stacked else f"{q}.bias",),
        lambda value: (_neighbours(value, heads),),
        lambda values: _halves(values[0], heads),
    )
    yield same(f"{ours}.value_bias", f"{theirs}.v_bias" if is_stacked else f"{v}.bias")
    if shape.sub_norm == "all":
        yield from renamed(f"{ours}.norm", f"{theirs}.norm")
    yield from renamed(f"{ours}.out", f"{theirs}.proj")


def _neighbours(value: Tensor, heads: int) -> Tensor:
    """Rows i and i + d / 2 of each head, which are turned together, become rows 2 i and 2 i + 1."""
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _halves(value: Tensor, heads: int) -> Tensor:
    """The inverse of `_neighbours`."""
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def nearest(shape: "ViTShape", models: Mapping[str, Dimensions]) -> tuple[str, dict[str, Any]]:
    """Of timm's models, patch size, width, depth and heads by name, the most similar; the arguments that differ."""
    ours = (shape.patch_size, shape.width, shape.depth, shape.num_heads)
    name = max(models, key=lambda each: sum(a == b for a, b in zip(ours, models[each], strict=True)))
    pairs = zip(("patch_size", "embed_dim", "depth", "num_heads"), ours, models[name], strict=True)
    return name, {key: own for key, own, named in pairs if own != named}


def timm(model: "ViT") -> TimmModel:
    """timm's model for one without `other_parts`: the most similar name, and what differs as arguments."""
    shape = model.shape
    models = {name: named for name, (sub_norm, named) in _MODELS.items() if sub_norm == shape.sub_norm}
    name, dimensions = nearest(shape, models)
    arguments = {"img_size": model.image_size, "global_pool": _POOLS[model.pool], **dimensions}
    if int(shape.width * _RATIO) != shape.mlp_dim:
        arguments["mlp_ratio"] = mlp_ratio(shape.width, shape.mlp_dim)
    if model.position_base != _BASE:
        arguments["rope_temperature"] = model.position_base
    return TimmModel(
        f"{name}_224",
        arguments,
        {"num_features": shape.width, "global_pool": _POOLS[model.pool]},
        {"first_conv": "patch_embed.proj", "classifier": "head"},
        fixed_size=True,
    )


def is_one(name: str) -> bool:
    """Whether timm's model of this name is one of these."""
    return name.rpartition("_")[0] in _MODELS


def position(source: Source, arguments: dict[str, Any]) -> dict[str, Any]:
    """Our block of positions for timm's arguments. Raises `CheckpointError` for rotations not computed here."""
    check_arguments(source, _SEEN, _TAKEN)
    if (grid := arguments.get("ref_feat_shape", _GRID)) != _GRID:
        raise contradicted(source, "ref_feat_shape", grid, str(_GRID))
    return {"kind": POSITION, "base": arguments.get("rope_temperature", _BASE)}
