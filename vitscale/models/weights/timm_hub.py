"""A folder as timm keeps models on the Hugging Face hub: config.json and model.safetensors.

From config.json timm builds the model and the preprocessing of its images.
"""

import math
from pathlib import Path
from typing import Any

from vitscale.errors import RecipeError
from vitscale.families import ResNetShape, ViTShape
from vitscale.models.build import Model
from vitscale.models.layers import CHANNELS
from vitscale.models.vit import ViT
from vitscale.models.weights.preprocessing import crop_of, resized_edge
from vitscale.models.weights.source import Source, differing
from vitscale.models.weights.torch_files import CONFIG, SAFETENSORS, read_beside_config
from vitscale.recipe import EvalCrop

_PIXELS = {"mean": [0.5] * CHANNELS, "std": [0.5] * CHANNELS}
_GELU = {"act_layer": "gelu_tanh"}
_MEAN_POOL = {"global_pool": "avg", "class_token": False, "fc_norm": False}
# timm's name -> blocks of the stem, and the arguments that the name stands for. Any other value can be given besides.
_DIMENSIONS = ("patch_size", "embed_dim", "depth", "num_heads")
_VITS: dict[str, tuple[tuple[int, ...] | None, tuple[int, int, int, int]]] = {
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
_RESNETS = {
    ResNetShape((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ResNetShape((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ResNetShape((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ResNetShape((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ResNetShape((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ResNetShape((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def timm_name(model: Model) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments by which `timm.create_model` builds this model, its classes aside; None for none."""
    if not isinstance(model, ViT):
        name = _RESNETS.get(model.shape)
        return None if name is None else (name, {})
    shape, stem = model.shape, model.shape.stem
    blocks = None if stem is None else stem.blocks
    if shape.attention == "axial" or (stem is not None and stem != ResNetShape(stem.blocks, variant="v1")):
        return None
    dimensions = (shape.patch_size, shape.width, shape.depth, shape.num_heads)
    alike = {
        name: sum(a == b for a, b in zip(dimensions, named, strict=True))
        for name, (named_blocks, named) in _VITS.items()
        if named_blocks == blocks
    }
    if not alike:
        return None
    nearest = max(alike, key=alike.__getitem__)
    own = zip(_DIMENSIONS, dimensions, _VITS[nearest][1], strict=True)
    arguments: dict[str, Any] = {"img_size": model.image_size} | {
        key: ours for key, ours, named in own if ours != named
    }
    if shape.mlp_dim != 4 * shape.width:
        ratio = shape.mlp_dim / shape.width
        # timm takes the whole part of width * ratio.
        arguments["mlp_ratio"] = ratio if int(shape.width * ratio) == shape.mlp_dim else math.nextafter(ratio, math.inf)
    return nearest, arguments | _GELU | (_MEAN_POOL if model.cls is None else {})


def configuration(model: Model, num_classes: int | None, labels: list[str] | None, crop: EvalCrop) -> dict[str, Any]:
    """The content of config.json; labels are distinct. Raises `RecipeError` where timm has no name for the model."""
    if (found := timm_name(model)) is None:
        raise RecipeError(
            "timm has no name for this model, by which a folder of its could be opened; "
            f"write the weights alone: --out FILE{SAFETENSORS}"
        )
    name, arguments = found
    if isinstance(model, ViT):
        about = {"num_features": model.shape.width, "global_pool": "avg" if model.cls is None else "token"}
        first_conv = "patch_embed.proj" if model.stem is None else "patch_embed.backbone.stem.conv"
        layers = {"first_conv": first_conv, "classifier": "head"}
    else:
        about = {"num_features": model.shape.channels, "global_pool": "avg"}
        layers = {"first_conv": "stem.conv", "classifier": "head.fc"}
    return {
        "architecture": name,
        "num_classes": num_classes or 0,
        **about,
        **({"label_names": labels} if labels else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [CHANNELS, model.image_size, model.image_size],
            "fixed_input_size": isinstance(model, ViT),
            "interpolation": "bilinear",
            "crop_pct": _crop_pct(model.image_size, crop),
            "crop_mode": "center" if crop.kind == "central" else "squash",
            **_PIXELS,
            "num_classes": num_classes or 0,
            **layers,
        },
    }


def loading_lines(path: Path, model: Model, num_classes: int | None) -> list[str]:
    """Python that opens a written folder or file; empty where timm has no name for the model."""
    if path.suffix != SAFETENSORS:
        return [
            f"model = timm.create_model({f'local-dir:{path}'!r}, pretrained=True)",
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        ]
    if (found := timm_name(model)) is None:
        return []
    name, arguments = found
    arguments = {"num_classes": num_classes or 0, **arguments, "checkpoint_path": str(path)}
    return [f"model = timm.create_model({name!r}, {', '.join(f'{key}={value!r}' for key, value in arguments.items())})"]


def read_folder(folder: Path, config: dict[str, Any]) -> Source:
    """A folder of timm's with this config.json. Raises `CheckpointError`."""
    data = _object(config, "pretrained_cfg") or config  # the older form has all in one
    activation = {"act_layer": "gelu"} | _object(config, "model_args") if "vit" in config["architecture"] else {}
    notes = [
        *differing(folder / CONFIG, activation, _GELU, "logits will differ a little"),
        *differing(folder / CONFIG, data, _PIXELS, "the same image is another input here"),
    ]
    return Source(
        folder,
        "timm",
        read_beside_config(folder),
        config=config,
        class_names=_class_names(config.get("label_names") or data.get("label_names")),
        eval_crop=_crop(data),
        notes=tuple(notes),
    )


def is_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is timm's."""
    return isinstance(config.get("architecture"), str) and "model_type" not in config


def contradictions(config: dict[str, Any], shape: ViTShape) -> list[tuple[str, str]]:
    """(key, what is wrong) where a config.json has another number of heads, which no tensor shows."""
    if (name := config["architecture"].partition(".")[0]) not in _VITS:
        return []
    heads = _object(config, "model_args").get("num_heads", _VITS[name][1][-1])
    return (
        []
        if heads == shape.num_heads
        else [("", f"{CONFIG}: num_heads is {heads!r}, the model's is {shape.num_heads}")]
    )


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _class_names(names: Any) -> list[str] | None:
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _crop(data: dict[str, Any]) -> EvalCrop | None:
    mode = data.get("crop_mode", "center")
    return crop_of(1, data.get("crop_pct"), is_square=mode == "squash") if mode in ("center", "squash") else None


def _crop_pct(image_size: int, crop: EvalCrop) -> float:
    """The share of which timm makes the edge that we want: the whole part of image_size / share."""
    edge = resized_edge(image_size, crop)
    share = image_size / edge
    return share if math.floor(image_size / share) == edge else math.nextafter(share, 0)
