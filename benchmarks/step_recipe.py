"""The training that benchmarks of a step measure: 224 x 224 pixels, AdamW, clipping, bf16, softmax."""

import os
from typing import Any

import torch

from vitscale.recipe import Recipe, validate_recipe

SIDE = 224


def make_recipe(
    name: str, batch: int, ranks: int = 1, *, num_classes: int | None = None, folder: str = "", **blocks: Any
) -> Recipe:
    """A recipe without accumulation.

    Args:
        name: of the model.
        batch: images of each rank.
        num_classes: None for those of the dataset `train` in `folder`.
        blocks: added to the recipe's own, key by key.
    """
    content: dict[str, Any] = {
        "model": {"name": name, "head": "linear", "num_classes": num_classes},
        "data": {"train": "train", "root": folder, "image_size": SIDE},
        "batch": {"global": batch * ranks, "micro_max": batch},
        "objective": {"loss": "softmax"},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"duration": {"steps": 100_000}, "warmup": {"steps": 10}},
        "logging": {"tensorboard": False},
    }
    for key, block in blocks.items():
        content[key] = {**content.get(key, {}), **block}
    return validate_recipe(content, "benchmark")


def join(rank: int, ranks: int, port: int) -> Any:
    """This process as a rank of a world of this machine."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from vitscale.training import distributed

    return distributed.start(rank, ranks, rank)


def build(recipe: Recipe, num_classes: int, ranks: int) -> Any:
    """A DeepSpeed engine around the recipe's model, with its initial values."""
    import deepspeed

    from vitscale.models import build_model, initialise
    from vitscale.training.engine import build_engine, derive_config

    config = derive_config(recipe, ranks)
    if recipe.parallelism.zero_stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build_model(recipe, num_classes)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            initialise(model, seed=0)
    else:
        model = build_model(recipe, num_classes)
        initialise(model, seed=0)
        model.to(torch.bfloat16)
    return build_engine(recipe, model, config)
