"""A folder of transformers' ViT, DeiT, MAE, DINO or Swin: config.json, preprocessor_config.json, model.safetensors."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitscale.ground.errors import CheckpointError
from vitscale.ground.wording import shortened
from vitscale.models.layers import CHANNELS
from vitscale.models.model import Model
from vitscale.models.weights.foreign import Backbone
from vitscale.models.weights.preprocessing import crop_of, filter_of, normalise_of, otherwise, resize_of, resized_edge
from vitscale.models.weights.source import MOST_PIXELS, Entry, Source, names_of, read_json, rename, without_indices
from vitscale.models.weights.torch_files import CONFIG, read_beside_config
from vitscale.recipe import EvalCrop, Normalise

PREPROCESSOR = "preprocessor_config.json"
ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "exact_gelu": "gelu", "quick_gelu": "quick_gelu", "swiglu": "silu"}
"""What transformers calls the functions of our `mlp`."""
_VIT: dict[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    **{"patch_size": 16, "qkv_bias": True, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
}
_DINOV2: dict[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4},
    **{"qkv_bias": True, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "num_channels": CHANNELS},
    "use_swiglu_ffn": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # model_type -> what transformers takes for what a config.json leaves out
    "vit": _VIT,
    "deit": _VIT,
    "vit_mae": _VIT | {"decoder_num_attention_heads": 16},
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"patch_size": 16, "num_register_tokens": 4},
    "dinov3_vit": {
        **{"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
        **{"patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_theta": 100.0},
        **{"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True},
        **{"num_channels": CHANNELS, "num_register_tokens": 0, "use_gated_mlp": False},
    },
    "swin": {
        **{"image_size": 224, "patch_size": 4, "num_channels": CHANNELS, "embed_dim": 96, "depths": [2, 2, 6, 2]},
        **{"num_heads": [3, 6, 12, 24], "window_size": 7, "mlp_ratio": 4.0, "qkv_bias": True, "hidden_act": "gelu"},
        **{"use_absolute_embeddings": False, "layer_norm_eps": 1e-5},
    },
}
# A state dict with a key that ends so is transformers'.
LANDMARKS = ("embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.weight")
_MASK, _DISTILLATION = "embeddings.mask_token", "embeddings.distillation_token"
_FILTERS = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers, which files of transformers name them by
_UNDONE = ("do_flip_channel_order", "do_grayscale")
_RENAMES = (  # the modules of transformers 5 -> the names in its files and version 4's
    (r"^(vit|deit)\.layers\.(\d+)\.", r"\1.encoder.layer.\2."),
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),  # as version 5 writes an MAE's decoder
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
_PREFIX_OF_DINO = r"^(dinov2(_with_registers)?\.|model\.(?=layer\.))"  # of modules in some version; files have none
_OF_SWIN = re.compile(r"(^|\.)encoder\.layers\.\d+\.blocks\.")
_RENAMES_OF_SWIN = (
    (r"^(?=embeddings\.|encoder\.|layernorm\.)", "swin."),
    (r"\.attention\.q_proj\.", ".attention.self.query."),
    (r"\.attention\.k_proj\.", ".attention.self.key."),
    (r"\.attention\.v_proj\.", ".attention.self.value."),
    (r"\.attention\.relative_position_bias\.", ".attention.self."),
    *_RENAMES[4:],
)


def renamed(path: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries by the names in files of transformers. Raises `CheckpointError`."""
    if any(map(_OF_SWIN.search, entries)):
        found = rename(path, entries, lambda name: _replaced(name, _RENAMES_OF_SWIN))
        return without_indices(found)
    if any(".layer_scale1." in key for key in entries):
        found = rename(path, entries, lambda name: re.sub(_PREFIX_OF_DINO, "", name))
        return {key: entry for key, entry in found.items() if 0 not in entry.shape}  # as many registers may be there
    model = "deit" if any(key.endswith("embeddings.distillation_token") for key in entries) else "vit"
    named = rename(path, entries, lambda name: file_name(name, model))
    token, positions = (named.get(f"deit.embeddings.{part}") for part in ("distillation_token", "position_embeddings"))
    if token is not None and positions is not None and "cls_classifier.weight" not in named:
        # Without a head of its own the token is a register here, which has no position: that is added to it.
        own = positions
        named[f"deit.{_DISTILLATION}"] = token.changed(token.shape, lambda value: value + own.read()[:, 1:2])
    return named


def file_name(name: str, model: str = "vit") -> str:
    """The name in files for a module's name in some version; a model without a head has no `vit.` before its names."""
    if not name.startswith((f"{model}.", "classifier.", "cls_classifier.", "distillation_classifier.", "decoder.")):
        name = f"{model}.{name}"
    return _replaced(name, _RENAMES)


def _replaced(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def read_folder(folder: Path, config: dict[str, Any]) -> Source:
    """Read a transformers folder with this config.json. Raises `CheckpointError` without a Vision Transformer."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        known = ", ".join(map(repr, _DEFAULTS))
        raise CheckpointError(
            f"{folder / CONFIG}: expected a Vision Transformer's model_type, one of {known}; found "
            f"{shortened(repr(kind))}"
        )
    config = _DEFAULTS[kind] | config
    preprocessor = read_json(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else {}
    entries = renamed(folder, read_beside_config(folder))
    notes = [f"{_MASK} is not read: a mask is part of an objective here"] if _MASK in entries else []
    crop = _crop(preprocessor)
    notes += [f"{key} of its preprocessing is not done here" for key in _UNDONE if preprocessor.get(key)]
    if "classifier.weight" not in entries and (unread := [key for key in entries if ".pooler." in key]):
        notes.append("its pooler is not read: it is part of no classifier")
        entries = {key: entry for key, entry in entries.items() if key not in unread}
    return Source(
        folder,
        "hf",
        entries,
        config=config,
        class_names=_class_names(config),
        eval_crop=crop,
        image_size=_image_size(preprocessor),
        normalise=_normalise(preprocessor),
        notes=tuple(notes),
        seen_otherwise=otherwise(crop, _filter(preprocessor)) if preprocessor else (),
    )


def _class_names(config: dict[str, Any]) -> list[str] | None:
    """The classes that a config.json names, unless they are the placeholders of transformers."""
    names = names_of(config.get("id2label"))
    return None if names is None or names == [f"LABEL_{i}" for i in range(len(names))] else names


def _crop(preprocessor: dict[str, Any]) -> EvalCrop | None:
    """The crop of a preprocessor_config.json; None if it is none of ours."""
    size, crop = (_sides(preprocessor.get(key)) for key in ("size", "crop_size"))
    if not preprocessor.get("do_center_crop", False):
        crop = size if len(size) == 2 else []  # the shortest edge alone is no square
    if len(set(size)) != 1 or len(set(crop)) != 1 or not preprocessor.get("do_resize", True):
        return None
    return crop_of(size[0], crop[0], is_square=len(size) == 2, resize=resize_of(_filter(preprocessor)))


def _filter(preprocessor: dict[str, Any]) -> object:
    number = preprocessor.get("resample")
    return next((name for name, ours in _FILTERS.items() if number == ours), number)


def _image_size(preprocessor: dict[str, Any]) -> int | None:
    """The side of the pictures that a preprocessor_config.json makes; None if they are no squares."""
    sides = _sides(preprocessor.get("crop_size" if preprocessor.get("do_center_crop", False) else "size"))
    return sides[0] if len(sides) == 2 and sides[0] == sides[1] and 0 < sides[0] <= MOST_PIXELS else None


def _normalise(preprocessor: dict[str, Any]) -> Normalise | None:
    """How a preprocessor_config.json normalises pixels; None if it does not say, or we cannot do the same."""
    factor = preprocessor.get("rescale_factor", 1 / 255)
    if not (preprocessor.get("do_rescale", True) and isinstance(factor, float) and math.isclose(factor, 1 / 255)):
        return None
    if not preprocessor.get("do_normalize", True):
        return Normalise(mean=[0.0] * CHANNELS, std=[1.0] * CHANNELS)
    return normalise_of(preprocessor.get("image_mean"), preprocessor.get("image_std"))


def _sides(size: Any) -> list[int]:
    """Height and width, or the shortest edge alone; empty for what is neither."""
    if isinstance(size, int):  # as files of transformers before 4.25 have it
        return [size, size]
    if not isinstance(size, dict) or "longest_edge" in size:
        return []
    keys = [key for key in ("shortest_edge", "height", "width") if key in size]
    return [size[key] for key in keys if isinstance(size[key], int)]


def distinct(labels: list[str]) -> list[str]:
    """The labels, repeated ones with their class number appended: label2id has room for one of a name."""
    while len(set(labels)) < len(labels):
        times = Counter(labels)
        labels = [f"{label} ({i})" if times[label] > 1 else label for i, label in enumerate(labels)]
    return labels


def configuration(
    model: Model, labels: list[str], crop: EvalCrop, normalise: Normalise, backbone: Backbone | None = None
) -> dict[str, dict[str, Any]]:
    """File name -> content of the JSON files; labels are distinct."""
    if backbone is not None:
        config = backbone.config
    else:
        config = {
            **model.foreign().transformers_config(),
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }
    size, edge = config.get("image_size", model.image_size), resized_edge(model.image_size, crop)
    preprocessor = {
        "image_processor_type": "BitImageProcessor",  # a ViTImageProcessor cannot crop
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": edge} if crop.kind == "central" else {"height": edge, "width": edge},
        "resample": _FILTERS[filter_of(crop)],
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": normalise.mean,
        "image_std": normalise.std,
    }
    return {CONFIG: config, PREPROCESSOR: preprocessor}


def loading_lines(folder: Path, model: Model, *, as_backbone: bool = False) -> list[str]:
    """Python that opens a written folder."""
    foreign = model.foreign()
    (architecture,) = (foreign.backbone().config if as_backbone else foreign.transformers_config())["architectures"]
    return [
        f"model = transformers.{architecture}.from_pretrained({str(folder)!r})",
        f"processor = transformers.AutoImageProcessor.from_pretrained({str(folder)!r})",
    ]
