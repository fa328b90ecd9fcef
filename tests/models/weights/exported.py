"""Models with values, and their weights written in a format: what the tests of the weights share."""

import itertools
import math
from pathlib import Path

import torch
import yaml
from models.small_models import with_values

from vitscale.models import Model
from vitscale.models.weights import Description, Format, write_weights
from vitscale.recipe import validate_recipe
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointStore, Fragment
from vitscale.runs.names import CHECKPOINTS, RECIPE_FILE

SUFFIX = {"safetensors": ".safetensors", "npz": ".npz", "timm": ".safetensors", "hf": ""}
TINY = {"patch_size": 8, "width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 3}

NAMES = [f"kind {i}" for i in range(7)]


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


def finished_run(
    folder: Path, model: torch.nn.Module, block: dict, layout: str = "whole", ranks: int = 1, names=NAMES, **settings
) -> Path:
    """The directory of a run that has ended with this model, checkpoints of steps 2 and 3."""
    data = {"train": "toy", "image_size": 64} | settings.pop("data", {})
    recipe = validate_recipe(
        settings
        | {
            "model": block,
            "data": data,
            "batch": {"global": 8},
            "optimizer": {"name": "adamw", "lr": 1e-3},
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
