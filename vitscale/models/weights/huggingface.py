"""A folder of transformers' `ViTForImageClassification`: config.json, preprocessor_config.json, model.safetensors."""

import json
import re
from pathlib import Path
from typing import Any

from vitscale.errors import CheckpointError
from vitscale.models.layers import CHANNELS, LAYER_NORM_EPS
from vitscale.models.vit import ViT
from vitscale.models.weights.source import Source, rename
from vitscale.models.weights.torch_files import read_safetensors, read_shards, read_torch

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHTS = "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
_OLD_WEIGHTS = "pytorch_model.bin"
_ACTIVATION = "gelu_pytorch_tanh"
_RENAMES = (  # the modules of transformers 5 -> the names in its files and version 4's
    (r"^vit\.layers\.(\d+)\.", r"vit.encoder.layer.\1."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def is_key(key: str) -> bool:
    """Whether a state dict with this key is transformers'."""
    return key.endswith("embeddings.patch_embeddings.projection.weight")


def file_name(name: str) -> str:
    """The name in files for what is a module's name in some version; `ViTModel` has no `vit.` before its names."""
    if not name.startswith(("vit.", "classifier.")):
        name = f"vit.{name}"
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def read_folder(folder: Path) -> Source:
    """Raises `CheckpointError` for a folder without a Vision Transformer."""
    config = _read_config(folder / CONFIG)
    if (folder / WEIGHTS).is_file():
        entries = read_safetensors(folder / WEIGHTS)[0]
    elif (folder / _INDEX).is_file():
        entries = read_shards(folder / _INDEX)
    elif (folder / _OLD_WEIGHTS).is_file():
        entries = read_torch(folder / _OLD_WEIGHTS)
    else:
        raise CheckpointError(f"{folder}: no {WEIGHTS}, {_INDEX} or {_OLD_WEIGHTS} beside {CONFIG}")
    differing = [
        f"{key} {config[key]!r} (here {ours!r})"
        for key, ours in (("hidden_act", _ACTIVATION), ("layer_norm_eps", LAYER_NORM_EPS))
        if config.get(key, ours) != ours
    ]
    notes = (f"{CONFIG} asks for {' and '.join(differing)}: logits will differ a little",) if differing else ()
    return Source(folder, "hf", rename(folder, entries, file_name), notes=notes)


def class_names(folder: Path) -> list[str] | None:
    """The classes that a folder names, unless they are the placeholders of transformers."""
    named = _read_config(folder / CONFIG).get("id2label")
    if not isinstance(named, dict):
        return None
    names = [named.get(str(i)) for i in range(len(named))]
    if any(name is None for name in names) or all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return None
    return [str(name) for name in names]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "vit":
        raise CheckpointError(f"{path}: expected model_type 'vit', a Vision Transformer's; found {kind!r}")
    return config


def configuration(model: ViT, num_labels: int, class_names: list[str] | None) -> dict[str, dict[str, Any]]:
    """File name -> content of the JSON files. The image size is the part of the image that whole patches cover."""
    shape = model.shape
    size = shape.grid(model.image_size) * shape.patch_size
    labels = class_names or [f"LABEL_{i}" for i in range(num_labels)]
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.mlp_dim,
        "hidden_act": _ACTIVATION,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": LAYER_NORM_EPS,
        "image_size": size,
        "patch_size": shape.patch_size,
        "num_channels": CHANNELS,
        "qkv_bias": True,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * CHANNELS,
        "image_std": [0.5] * CHANNELS,
    }
    return {CONFIG: config, PREPROCESSOR: preprocessor}
