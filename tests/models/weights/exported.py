"""Models with values, and their weights written in a format: what the tests of the weights share."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from models.small_models import images, with_large_kernels, with_values

from vitscale.models import Model
from vitscale.models.weights import Description, Format, load_weights, open_weights, write_weights
from vitscale.recipe import validate_recipe
from vitscale.recipe.families import SwinShape
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointStore, Fragment
from vitscale.runs.names import CHECKPOINTS, RECIPE_FILE

SUFFIX = {"safetensors": ".safetensors", "npz": ".npz", "timm": ".safetensors", "hf": ""}
TINY = {"patch_size": 8, "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3}

LINEAR = TINY | {"head": "linear"}
NAMES = [f"kind {i}" for i in range(7)]


def described(block: dict, image_size: int = 64, num_classes: int = 7, class_names=None) -> Description:
    return Description({"head": "linear"} | block, image_size, num_classes, class_names)


def valued(description: Description, seed: int = 0) -> Model:
    """The described model, every parameter random and none near zero."""
    return with_values(description.build().to_empty(device="cpu"), seed).eval()


def prepared(block: dict) -> tuple[Description, Model]:
    """A model of which no library's eps matters."""
    description = described(block)
    return description, with_large_kernels(valued(description))


def randomised(peer: torch.nn.Module, std: float = 0.3) -> torch.nn.Module:
    """A model of another library, every parameter random; vectors are far from zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std, generator=generator)
            else:
                parameter.uniform_(0.2, 0.8, generator=generator)
    return peer.eval()


def opened_by_timm(folder: Path) -> torch.nn.Module:
    return pytest.importorskip("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()


def transformers_config(**changes: object):
    """Transformers' configuration of `TINY`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    ours = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "image_size": 64, "patch_size": 8}
    return transformers.ViTConfig(**sizes | ours | changes)


def write(
    model: Model, description: Description, form: Format, folder: Path, drop_head: bool = False, name: str = ""
) -> Path:
    """Write a model's weights in a format; where they are. timm's are a file, or a folder if `name` has no suffix."""
    path = folder / (name or f"{form}{SUFFIX[form]}")
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_weights(path, form, description, values.__getitem__, drop_head)
    return path


def written(
    folder: Path,
    form: Format,
    block: dict = TINY,
    image_size: int = 64,
    drop_head: bool = False,
    name: str = "",
    **others,
) -> tuple[Path, Model, Description]:
    """Where a model with values is in a format, the model, and its description; others as `described` takes them."""
    description = described(block, image_size, **others)
    model = valued(description)
    return write(model, description, form, folder, drop_head, name), model, description


def loaded(description: Description, path: Path, notes: list[str] | None = None) -> Model:
    """The described model with the weights that are there; what is reported goes to `notes`."""
    model = description.build().to_empty(device="cpu").eval()
    load_weights(model, open_weights(path), report=[].append if notes is None else notes.append)
    return model


def differing(a: Model, b: Model) -> list[str]:
    """Parameters that are not equal."""
    theirs = dict(b.named_parameters())
    return [name for name, parameter in a.named_parameters() if not torch.equal(parameter, theirs[name])]


def assert_equal_logits(model: Model, peer: torch.nn.Module, size: int = 64, within: float = 1e-4) -> None:
    """Compare with a model of another library, which takes (B, 3, H, W), on the pixels that our patches see."""
    pixels, stride = images(size), 1 if isinstance(model.shape, SwinShape) else model.shape.stride
    seen = size // stride * stride
    with torch.no_grad():
        ours, theirs = model(pixels).logits, peer(pixels.permute(0, 3, 1, 2)[:, :, :seen, :seen])
    assert ours.std() > 0.1
    assert (ours - getattr(theirs, "logits", theirs)).abs().max() < within


def printed_lines(capsys) -> str:
    """The lines of Python that an export has printed."""
    return "\n".join(line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    "))


def edited(path: Path, **changes: object) -> None:
    """A JSON file with other values; None takes a key away."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def _fragments(model: torch.nn.Module, layout: str, ranks: int) -> list[Fragment]:
    """The masters as the ranks of a ZeRO stage hold them: whole, in slices of one long vector, or each in shares."""
    found, place = [], 0
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        length = len(flat)
        if layout == "slices":
            cuts = {math.ceil(total / ranks) * rank - place for rank in range(ranks)}
        else:
            cuts = {math.ceil(length / ranks) * rank for rank in range(ranks)} if layout == "shares" else set()
        edges = sorted({0, length} | {cut for cut in cuts if 0 < cut < length})
        found += [Fragment(name, a, {"master": flat[a:b]}) for a, b in itertools.pairwise(edges)]
        place += length
    return found


def run_of(folder: Path, block: dict = LINEAR, **options) -> Path:
    """The directory of a run that has ended with this block's model; options as `finished_run` takes them."""
    return finished_run(folder, valued(described(block)), block, **options)


def finished_run(
    folder: Path, model: torch.nn.Module, block: dict, layout: str = "whole", ranks: int = 1, names=NAMES, **settings
) -> Path:
    """The directory of a run that has ended with this model, checkpoints of steps 2 and 3."""
    data = {"train": "toy", "image_size": 64} | settings.pop("data", {})
    recipe = validate_recipe(
        settings
        | {
            **{"model": block, "data": data, "batch": {"global": 8}, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "schedule": {"duration": {"steps": 3}},
        },
        "test",
    )
    folder.mkdir()
    (folder / RECIPE_FILE).write_text(yaml.safe_dump(recipe.dump()))
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    for step in (2, 3):
        index = CheckpointIndex(
            step=step,
            world_size=ranks,
            shapes=shapes,
            kinds=["master"],
            optimizer_steps=step,
            recipe=recipe.dump(),
            data={"class_names": list(names), "working_directory": str(folder.parent)},
            versions={},
        )
        CheckpointStore(folder / CHECKPOINTS).save(index, _fragments(model, layout, ranks))
    return folder
