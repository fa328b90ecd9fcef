"""A folder as timm keeps models on the Hugging Face hub: config.json and model.safetensors.

From config.json timm builds the model and the preprocessing of its images.
"""

import math
import re
from pathlib import Path
from typing import Any

from vitscale.ground.errors import RecipeError
from vitscale.ground.wording import shortened
from vitscale.models.layers import CHANNELS
from vitscale.models.model import Model
from vitscale.models.weights.preprocessing import crop_of, filter_of, normalise_of, otherwise, resize_of, resized_edge
from vitscale.models.weights.source import MOST_PIXELS, Entry, Source, contradicted, names_of, rename, without_indices
from vitscale.models.weights.torch_files import SAFETENSORS, read_beside_config
from vitscale.recipe import EvalCrop, Normalise

# timm's defaults for a folder that says nothing; from ImageNet's pixels.
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_INTERPOLATION, _CROP_PCT = "bicubic", 0.875
# Arguments of timm's models that change nothing in evaluation, or that every tensor's shape follows.
_IDLE = {
    *("img_size", "in_chans", "num_classes", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
    *("attn_drop_rate", "drop_path_rate", "weight_init", "fix_init", "dynamic_img_size", "dynamic_img_pad"),
    *("strict_img_size", "head_init_scale", "zero_init_last"),
}
_REGISTERS, _GATED = "register_tokens", "blocks.0.mlp.w12.weight"  # as DINOv2's authors call them
_SWIN = "layers.0.blocks.0.attn.relative_position_bias_table"
_MERGING = r"^layers\.(\d{1,4})\.downsample\."


def configuration(
    model: Model, num_classes: int | None, labels: list[str] | None, crop: EvalCrop, normalise: Normalise
) -> dict[str, Any]:
    """The content of config.json; labels are distinct. Raises `RecipeError` if timm has no name for the model."""
    if (found := model.foreign().timm()) is None:
        raise RecipeError(
            "timm has no name for this model, so it could not open a folder; "
            f"write the weights alone: --out FILE{SAFETENSORS}"
        )
    return {
        "architecture": found.name,
        "num_classes": num_classes or 0,
        **found.about,
        **({"label_names": labels} if labels else {}),
        "model_args": found.arguments,
        "pretrained_cfg": {
            "input_size": [CHANNELS, model.image_size, model.image_size],
            "fixed_input_size": found.fixed_size,
            "interpolation": filter_of(crop),
            "crop_pct": _crop_pct(model.image_size, crop),
            "crop_mode": "center" if crop.kind == "central" else "squash",
            **normalise.model_dump(),
            "num_classes": num_classes or 0,
            **found.layers,
        },
    }


def mlp_ratio(width: int, hidden: int) -> float:
    """The ratio by which timm makes a layer this large: it takes the whole part of width * ratio."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def loading_lines(path: Path, model: Model, num_classes: int | None) -> list[str]:
    """Python that opens a written folder or file; empty if timm has no name for the model."""
    if path.suffix != SAFETENSORS:
        return [
            f"model = timm.create_model({f'local-dir:{path}'!r}, pretrained=True)",
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        ]
    if (found := model.foreign().timm()) is None:
        return []
    arguments = {"num_classes": num_classes or 0, **found.arguments, "checkpoint_path": str(path)}
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return [f"model = timm.create_model({found.name!r}, {listed})"]


def model_arguments(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """timm's name for a folder's model, and the arguments besides; empty for a state dict alone."""
    return str(config.get("architecture", "")).partition(".")[0], _object(config, "model_args")


def check_arguments(source: Source, seen: set[str], fixed: dict[str, tuple[Any, ...]]) -> None:
    """Refuse arguments with which timm computes something else than we do.

    Args:
        seen: the arguments that are read, or that show in the tensors.
        fixed: the others that are known, with the values that are computed here.

    Raises `CheckpointError`.
    """
    for key, value in model_arguments(source.config)[1].items():
        allowed = fixed.get(key, (None,))
        if key not in seen | _IDLE and value not in allowed:
            expected = " or ".join(map(repr, allowed)) if key in fixed else "no such argument: it is not known here"
            raise contradicted(source, shortened(f"model_args.{key}", 100), value, expected)


def renamed(path: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries by timm's names, where they are those of DINOv2's or Swin's authors. Raises `CheckpointError`.

    With registers, DINOv2's authors store a position of the class token, which timm adds to that token. Swin's authors
    count patch merging to the stage before it, and have no module around the head.
    """
    if _GATED in entries or _REGISTERS in entries:
        return _of_dinov2(path, entries)
    if _SWIN not in entries:
        return entries
    is_theirs = any(key.startswith("layers.0.downsample.") for key in entries)

    def new_name(name: str) -> str:
        name = re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", name)
        return re.sub(_MERGING, lambda at: f"layers.{int(at[1]) + 1}.downsample.", name) if is_theirs else name

    return rename(path, without_indices(entries), new_name)


def _of_dinov2(path: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    def new_name(name: str) -> str:
        if name == _REGISTERS:
            return "reg_token"
        return name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")

    named = rename(path, entries, new_name)
    token, positions = entries.get("cls_token"), entries.get("pos_embed")
    if _REGISTERS in entries and token is not None and positions is not None and len(positions.shape) == 3:
        one, length, width = positions.shape
        named["cls_token"] = token.changed(token.shape, lambda value: value + positions.read()[:, :1])
        named["pos_embed"] = positions.changed((one, max(length - 1, 0), width), lambda value: value[:, 1:])
    return named


def read_folder(folder: Path, config: dict[str, Any]) -> Source:
    """Read a folder in timm's format with this config.json. Raises `CheckpointError`."""
    data = _object(config, "pretrained_cfg") or config  # the older form has all in one
    crop = _crop(data)
    return Source(
        folder,
        "timm",
        renamed(folder, read_beside_config(folder)),
        config=config,
        class_names=names_of(config.get("label_names") or data.get("label_names")),
        eval_crop=crop,
        image_size=_image_size(data),
        normalise=normalise_of(data.get("mean", _MEAN), data.get("std", _STD)),
        seen_otherwise=otherwise(crop, data.get("interpolation", _INTERPOLATION)),
    )


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _image_size(data: dict[str, Any]) -> int | None:
    size = data.get("input_size")
    is_square = isinstance(size, list) and len(size) == 3 and type(size[1]) is int and size[1] == size[2]
    return size[1] if is_square and 0 < size[1] <= MOST_PIXELS else None  # type: ignore[index]


def _crop(data: dict[str, Any]) -> EvalCrop | None:
    mode = data.get("crop_mode", "center")
    if mode not in ("center", "squash"):
        return None
    resize = resize_of(data.get("interpolation", _INTERPOLATION))
    share = data.get("crop_pct")
    return crop_of(1, _CROP_PCT if share is None else share, is_square=mode == "squash", resize=resize)


def _crop_pct(image_size: int, crop: EvalCrop) -> float:
    """The share from which timm computes the edge that we want: the whole part of image_size / share."""
    edge = resized_edge(image_size, crop)
    share = image_size / edge
    return share if math.floor(image_size / share) == edge else math.nextafter(share, 0)
