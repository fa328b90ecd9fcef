"""Chooses the largest micro-batch of a run whose recipe leaves it to the device (`batch.micro_max: auto`)."""

from pathlib import Path

import torch

from vitscale.data.shards import Manifest
from vitscale.objectives import objective_class
from vitscale.recipe import MICRO_MAX_ON_CPU, Recipe, override, read_recipe
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.beginning.micro_batches import fitting_micro_batch


def settle_micro_max(recipe: Recipe, run_dir: Path, local_rank: int, world_size: int) -> tuple[Recipe, str | None]:
    """The recipe with its `micro_max` settled, and what was chosen and why, in words; None if that is nothing new.

    A run keeps what it began with. A new one gets what is expected to fit into the whole memory of this rank's device,
    so that equal devices give equal sizes whatever else is in them; the preflight looks at what is free.
    """
    if recipe.batch.micro_max != "auto":
        return recipe, None
    saved, words = run_dir / RECIPE_FILE, None
    most: int | str = read_recipe(saved).batch.micro_max if saved.exists() else "auto"
    if most == "auto" and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(local_rank % torch.cuda.device_count())
        manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
        num_classes = objective_class(recipe).num_outputs(recipe, manifest)
        most = fitting_micro_batch(recipe, num_classes, world_size, device.total_memory)
        words = (
            f"batch.micro_max {most}, which is expected to fit into {device.name} ({device.total_memory / 1e9:.0f} GB)"
        )
    elif most == "auto":
        most = MICRO_MAX_ON_CPU
    return override(recipe.dump(), [f"batch.micro_max={most}"], f"with batch.micro_max {most} the recipe"), words
