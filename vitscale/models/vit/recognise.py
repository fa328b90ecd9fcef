"""Which Vision Transformer weights of timm's or transformers' are for: its block and image size.

Most follows from the tensors' shapes. What no tensor shows (heads, form of GELU, epsilon) stands in config.json or is
what timm means by a name.
"""

import math
import re
from typing import Any

from vitscale.models.layers import CHANNELS
from vitscale.models.resnet.weights import units_of
from vitscale.models.vit import dino, eva
from vitscale.models.weights.huggingface import ACTIVATIONS
from vitscale.models.weights.source import Shapes, Source, contradicted
from vitscale.models.weights.timm_hub import check_arguments, model_arguments

# The word for a size in timm's names -> heads; and the width -> heads, for files without a name.
_HEADS = {
    **{"tiny": 3, "wee": 4, "dwee": 4, "little": 5, "dlittle": 5, "small": 6, "medium": 8, "mediumd": 8, "betwixt": 10},
    **{"base": 12, "so150m2": 13, "so150m": 14, "large": 16, "huge": 16, "giant": 16, "giantopt": 16, "gigantic": 16},
    **{"so400m": 16, "intern300m": 16},
}
_WIDE = (1152, 1280, 1408, 1664)  # these have 16 heads, all others heads of 64 channels
_KINDS = ("vit", "deit", "vit_mae", *dino.ARCHITECTURES)
_TANH = re.compile(r"vit_(?:(?:so400m|giantopt)_patch16|base_patch32)_siglip_|vit_large_patch16_siglip_(?:gap_)?512")
_TIMM_FUNCTIONS = {"gelu": "exact_gelu", "gelu_tanh": "gelu", "quick_gelu": "quick_gelu", "quickgelu": "quick_gelu"}
_HF_FUNCTIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_new": "gelu"}
_OTHERS = re.compile(r"^(?!(vit|deit3?|flexivit|eva|eva02)_)|_(rpn|rope|relpos|clip|mci|resnet\d+d)(_|$)")
# Arguments of timm's that show in the tensors or are read here; and another, with the value that we compute.
_SEEN = {
    *("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "global_pool", "norm_layer", "act_layer"),
    *("qkv_bias", "qk_norm", "proj_bias", "scale_attn_norm", "scale_mlp_norm", "init_values", "class_token"),
    *("pos_embed", "no_embed_class", "reg_tokens", "pre_norm", "final_norm", "fc_norm", "embed_norm_layer"),
}
_TAKEN: dict[str, tuple[Any, ...]] = {"pool_include_prefix": (False,)}
_BLOCK = re.compile(r"(?:^blocks|(?:^|\.)layer)\.(\d{1,5})\.")
_STEM = re.compile(r"patch_embed\.backbone\.stages\.(\d{1,4})\.blocks\.(\d{1,4})\.")
_BIASES: dict[tuple[bool, ...], str] = {  # of query, key and value
    **{(True, True, True): "all", (True, False, True): "no_key", (False, False, False): "none"}
}


def recognise(source: Source) -> tuple[dict[str, Any], int | None] | None:
    """As `Model.recognise`."""
    shapes = {key: entry.shape for key, entry in source.entries.items()}
    if source.form == "hf":
        return _of_transformers(source, shapes) if source.config.get("model_type") in _KINDS else None
    return _of_timm(source, shapes) if source.form == "timm" else None


def _of_timm(source: Source, shapes: Shapes) -> tuple[dict[str, Any], int | None] | None:
    name, arguments = model_arguments(source.config)
    patches, out = shapes.get("patch_embed.proj.weight", ()), shapes.get("blocks.0.mlp.fc2.weight", ())
    if (name and _OTHERS.search(name) and not eva.is_one(name)) or len(patches) != 4 or len(out) != 2:
        return None
    is_eva = "blocks.0.attn.q_bias" in shapes or "blocks.0.attn.q_proj.weight" in shapes
    is_gated = "blocks.0.mlp.fc1_g.weight" in shapes or shapes.get("blocks.0.mlp.fc1.bias") == (2 * out[1],)
    if is_eva and not (is_gated and (not name or eva.is_one(name))):
        return None
    block: dict[str, Any] = {"patch_size": patches[-1], "width": out[0], "depth": _depth(shapes), "mlp_dim": out[1]}
    _agree(source, {"patch_size": patches[-1], "embed_dim": out[0], "depth": block["depth"]}, arguments)
    if arguments.get("norm_layer") not in (None, "layernorm", "rmsnorm"):
        raise contradicted(source, "norm_layer", arguments["norm_layer"], "layernorm or rmsnorm")
    block |= {
        "num_heads": _whole(source, arguments.get("num_heads", _heads(name, out[0])), "num_heads"),
        "mlp": "swiglu" if is_gated else _function(source, name, arguments),
        "norm": "layer" if "blocks.0.norm1.bias" in shapes else "rms",
        "norm_eps": 1e-6,
        "qkv_bias": "no_key" if is_eva else "all" if "blocks.0.attn.qkv.bias" in shapes else "none",
        "qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
        "registers": _length(shapes, "reg_token"),
        "distilled": "dist_token" in shapes,
        "pool": _pool(source, shapes, name, arguments),
    }
    if "blocks.0.mlp.norm.weight" in shapes:
        block["sub_norm"] = "all" if "blocks.0.attn.norm.weight" in shapes else "mlp"
    if "blocks.0.ls1.gamma" in shapes:
        block["layer_scale"] = _initial_scale(arguments.get("init_values"))
    has_class = "cls_token" in shapes
    side, has_position = _side(_length(shapes, "pos_embed"), has_class + block["distilled"])
    if has_class:
        block["class_position"] = has_position
    elif block["pool"] == "normed_mean":
        block["class_token"] = False
    if is_eva:
        block["position"] = eva.position(source, arguments)
    else:
        check_arguments(source, _SEEN, _TAKEN)
    stride = block["patch_size"]
    if any(key.startswith("patch_embed.backbone.") for key in shapes):
        if (blocks := units_of(shapes, _STEM)) is None:
            return None
        block["blocks"] = blocks
        stride *= 4 * 2 ** max(len(block["blocks"]) - 1, 0)
    return block, side * stride or source.image_size


def _function(source: Source, name: str, arguments: dict[str, Any]) -> str:
    usual = "gelu_tanh" if _TANH.match(name) else "gelu"
    asked = arguments.get("act_layer") or usual
    if not isinstance(asked, str) or asked not in _TIMM_FUNCTIONS:
        raise contradicted(source, "act_layer", asked, "gelu, gelu_tanh or quick_gelu")
    return _TIMM_FUNCTIONS[asked]


def _heads(name: str, width: int) -> int:
    size = name.split("_")[1] if "_" in name else ""
    if size not in _HEADS or "_plus_" in name or (size, width) == ("giant", 1536):
        return 16 if width in _WIDE else max(width // 64, 1)
    return 16 if name == "vit_base_patch16_gap_224" else _HEADS[size]


def _pool(source: Source, shapes: Shapes, name: str, arguments: dict[str, Any]) -> str:
    pool, theirs = ("cls", "token") if "cls_token" in shapes else ("mean", "avg")
    if "attn_pool.latent" in shapes:
        pool, theirs = "map", "map"
    if "fc_norm.weight" in shapes:
        pool, theirs = "normed_mean", "avg"
    asked = arguments.get("global_pool", source.config.get("global_pool"))
    if asked is None and eva.is_one(name):
        asked = "token" if "_clip_" in name else "avg"
    elif asked is None and name:
        asked = "avg" if "_gap_" in name else "map" if re.search(r"_(siglip|map)_", name) else "token"
    if asked not in (None, "", theirs):
        raise contradicted(source, "global_pool", asked, f"{theirs}, as the tensors have it")
    return pool


def _of_transformers(source: Source, shapes: Shapes) -> tuple[dict[str, Any], int | None]:
    config, kind = source.config, source.config["model_type"]
    embeddings = {key.rpartition("embeddings.")[2]: shape for key, shape in shapes.items()}
    patches = embeddings.get("projection.weight") or embeddings.get("weight") or (0,)
    seen = {"hidden_size": _length(embeddings, "cls_token", 2), "num_hidden_layers": _depth(shapes)}
    _agree(source, seen | {"patch_size": patches[-1], "num_channels": CHANNELS}, config)
    block: dict[str, Any] = {
        "patch_size": patches[-1],
        "width": seen["hidden_size"],
        "depth": seen["num_hidden_layers"],
        "num_heads": _whole(source, config["num_attention_heads"], "num_attention_heads"),
        "norm_eps": config["layer_norm_eps"],
        "mlp": "swiglu",
    }
    is_gated = config.get("use_swiglu_ffn") is True or config.get("use_gated_mlp") is True
    known = {"silu": "swiglu"} if is_gated else {name: of for name, of in _HF_FUNCTIONS.items() if of != "swiglu"}
    asked = config["hidden_act"]
    if not (is_gated and kind != dino.DINOV3):  # whose gates are always those of SiLU
        if not isinstance(asked, str) or asked not in known:
            raise contradicted(source, "hidden_act", asked, " or ".join(known))
        block["mlp"] = known[asked]
    if kind in dino.DINOV2:
        ratio = config["mlp_ratio"]
        block["mlp_dim"] = dino.mlp_dim(seen["hidden_size"], _whole(source, ratio, "mlp_ratio"), block["mlp"])
    else:
        block["mlp_dim"] = _whole(source, config["intermediate_size"], "intermediate_size")
    if kind in dino.ARCHITECTURES:
        block["layer_scale"] = _initial_scale(config.get("layerscale_value"))
        block["registers"] = _length(embeddings, "register_tokens")
        said = 0 if kind == dino.DINOV2[0] else config["num_register_tokens"]
        if said != block["registers"]:
            raise contradicted(source, "num_register_tokens", said, f"{block['registers']}, as the tensors have it")
    elif kind == "deit":
        # Without a head for it the distillation token is a register, whose position is part of it.
        block |= {"distilled": True} if "cls_classifier.bias" in shapes else {"registers": 1}
    if kind != dino.DINOV3:
        side, _ = _side(_length(embeddings, "position_embeddings"), 2 if kind == "deit" else 1)
        if kind == "vit_mae":
            block["position"] = {"kind": "sincos", "table": "mae"}
        return block | {"qkv_bias": "all" if config["qkv_bias"] is True else "none"}, side * patches[-1] or None
    biases = tuple(config[f"{part}_bias"] is True for part in ("query", "key", "value", "proj", "mlp"))
    if biases[:3] not in _BIASES or biases[3:] != (True, True):
        raise contradicted(source, "biases of query, key, value, proj and mlp", biases, "those of a DINOv3")
    block |= {"qkv_bias": _BIASES[biases[:3]], "position": {"kind": "rope", "base": config["rope_theta"]}}
    return block, source.image_size or _whole(source, config.get("image_size", 224), "image_size")


def _length(shapes: Shapes, key: str, axis: int = 1) -> int:
    """The tokens, or with `axis` 2 the width, of learned ones (1, T, D); 0 without any."""
    return shapes[key][axis] if len(shapes.get(key, ())) == 3 else 0


def _side(length: int, first: int) -> tuple[int, bool]:
    """Patches along a side by the number of positions, 0 if no square; whether the `first` tokens have any."""
    for before in (0, first):
        side = math.isqrt(max(length - before, 0))
        if side > 0 and side**2 == length - before:
            return side, before > 0
    return 0, True


def _depth(shapes: Shapes) -> int:
    return 1 + max((int(found[1]) for key in shapes if (found := _BLOCK.search(key))), default=-1)


def _initial_scale(value: Any) -> float:
    """A layer scale's initial value, which the weights replace."""
    return value if isinstance(value, float) and 0 < value <= 1 else 1e-5


def _whole(source: Source, value: Any, key: str) -> int:
    """A number from config.json, where it may be given for height and width."""
    one = value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value
    if type(one) is not int or not 1 <= one < 2**20:
        raise contradicted(source, key, value, "a whole number")
    return one


def _agree(source: Source, seen: dict[str, int], config: dict[str, Any]) -> None:
    for key, value in seen.items():
        if key in config and _whole(source, config[key], key) != value:
            raise contradicted(source, key, config[key], f"{value}, as the tensors have it")
