"""A process as a rank, and the engine of a recipe on it without a trainer."""

import os
from typing import Any

from vitscale.recipe import Recipe


def join(rank: int, ranks: int, port: int) -> Any:
    """This process as a rank of a world of this machine."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from vitscale.training.deepspeed import distributed

    return distributed.start(rank, ranks, rank)


def build(recipe: Recipe, num_classes: int, ranks: int) -> Any:
    """An engine around the recipe's model, with its initial values."""
    import deepspeed

    from vitscale.models import initialise, weight_dtype
    from vitscale.objectives import build_objective
    from vitscale.training.deepspeed.config import derive_config
    from vitscale.training.deepspeed.engine import Engine

    config = derive_config(recipe, ranks)
    if recipe.parallelism.zero_stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            objective = build_objective(recipe, num_classes)
        with deepspeed.zero.GatheredParameters(list(objective.parameters()), modifier_rank=0):
            initialise(objective.backbone, seed=0)
    else:
        objective = build_objective(recipe, num_classes)
        initialise(objective.backbone, seed=0)
        objective.to(weight_dtype(recipe))
    return Engine(recipe, objective, config)
