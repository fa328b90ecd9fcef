"""The form in which a recipe is proved: its engine unchanged, around a small model of its family."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vitscale.ground.errors import RecipeError
from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, smoke_form, validate_recipe
from vitscale.training.deepspeed.config import derive_config

STEPS = 10
MOST_ACCUMULATED = 4
"""The most micro-batches of an update: beyond the first sum, one is like the other."""
_MOST_ROWS = 2
_ALIGNED = 8  # DeepSpeed wants multiples of this many elements
_USUAL_CLASSES = 1000
_PERSISTENT, _USUAL_PERSISTENT = "stage3_param_persistence_threshold", 100_000  # the default is DeepSpeed's
_SIZES = {  # sizes in elements -> whether there has to be room for the largest parameter
    "reduce_bucket_size": True,
    "allgather_bucket_size": True,
    "stage3_prefetch_bucket_size": False,
    "stage3_max_live_parameters": True,
    "stage3_max_reuse_distance": True,
    "sub_group_size": False,
    _PERSISTENT: False,
}
_NOT_RANDOM = {"dropout": 0.0, "drop_path": 0.0, "drop_path_rule": "growing"}  # a rule belongs to a drop_path


def small_form(recipe: Recipe, data_root: Path, ranks: int) -> Recipe:
    """The recipe with a small model, small images and micro-batches, and ten steps.

    Unchanged are the ZeRO stage and whatever else a `deepspeed` block says, precision, offload, compilation, what is
    recomputed, objective, optimizer, groups, clipping, kind of schedule, average, and whether micro-batches are
    accumulated. Sizes of buckets shrink with the model, so that it has several too. Dropout and drop-path are off.

    Raises `RecipeError` if the recipe does not run on so many ranks, or its model draws other random numbers.
    """
    micro, accumulation = recipe.split(ranks)
    sizes = derive_config(recipe, ranks)["zero_optimization"]
    if recipe.precision == "fp8":
        raise RecipeError(
            "precision: fp8 has two or three bits behind the first: no tolerance that follows from them would tell a "
            "wrong gradient from a right one; prove it with --set precision=bf16"
        )
    content = smoke_form(recipe, data_root, ranks).dump()
    content["model"] |= {key: value for key, value in _NOT_RANDOM.items() if key in content["model"]}
    rows = max(min(micro, _MOST_ROWS), recipe.objective.together)
    content["batch"] = {"global": rows * min(accumulation, MOST_ACCUMULATED) * ranks, "micro_max": rows}
    content["data"] |= {"repeats": 1}
    content["schedule"] |= {"duration": {"steps": STEPS}}
    content |= {"evaluation": {}, "selection": None, "checkpoint": {}, "profile": {}}
    content["logging"] |= {"trackers": []}
    small = validate_recipe(content, "the small form")
    if small.model.draws:
        raise RecipeError(f"{recipe.model.title} draws random numbers while it trains, which no oracle can know")
    shrunken = _shrunken(sizes, _elements(recipe), _elements(small))
    content["deepspeed"] = recipe.deepspeed | {
        "zero_optimization": recipe.deepspeed.get("zero_optimization", {}) | shrunken
    }
    return validate_recipe(content, "the small form")


def _elements(recipe: Recipe) -> list[int]:
    """The number of elements of each parameter of a recipe's objective."""
    with torch.device("meta"):
        objective = build_objective(recipe, recipe.model.num_classes or _USUAL_CLASSES)
    return [parameter.numel() for parameter in objective.parameters()]


def _shrunken(sizes: dict[str, Any], whole: Sequence[int], small: Sequence[int]) -> dict[str, int]:
    """Sizes of ZeRO's buckets in elements, scaled down with the model."""
    share = min(1.0, sum(small) / sum(whole))
    least = {True: max(small), False: 1}
    present = sizes | ({_PERSISTENT: sizes.get(_PERSISTENT, _USUAL_PERSISTENT)} if sizes["stage"] == 3 else {})
    return {
        key: -(-max(int(present[key] * share), least[holds_largest]) // _ALIGNED) * _ALIGNED
        for key, holds_largest in _SIZES.items()
        if key in present
    }
