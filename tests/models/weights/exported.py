"""Models with values, and their weights written in a format: what the tests of the weights share."""

from pathlib import Path

import torch
from models.small_models import with_values

from vitscale.models import Model
from vitscale.models.weights import Description, Format, write_weights

SUFFIX = {"safetensors": ".safetensors", "npz": ".npz", "timm": ".safetensors", "hf": ""}
TINY = {"patch_size": 8, "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3}


def described(block: dict, image_size: int = 64, num_classes: int = 7, class_names=None) -> Description:
    return Description({"head": "linear"} | block, image_size, num_classes, class_names)


def valued(description: Description, seed: int = 0) -> Model:
    """The described model, every parameter random and none near zero."""
    return with_values(description.build().to_empty(device="cpu"), seed).eval()


def write(model: Model, description: Description, form: Format, folder: Path, drop_head: bool = False) -> Path:
    """Write a model's weights in a format; where they are."""
    path = folder / f"{form}{SUFFIX[form]}"
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(path, form, description, values.__getitem__, drop_head)
    return path


def differing(a: Model, b: Model) -> list[str]:
    """Parameters that are not equal."""
    theirs = dict(b.named_parameters())
    return [name for name, parameter in a.named_parameters() if not torch.equal(parameter, theirs[name])]
