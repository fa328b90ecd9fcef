"""The largest micro-batch that fits (`batch.micro_max: auto`), and the tensors of any, interpolated from a few."""

from collections.abc import Callable
from pathlib import Path

import torch

from vitscale.data.shards import Manifest
from vitscale.objectives import objective_class
from vitscale.recipe import MICRO_MAX_ON_CPU, Recipe, override, read_recipe
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.beginning.memory import memory_of
from vitscale.training.beginning.tensors import StepTensors, model_parameters, step_tensors

USABLE = 0.95
"""The share of a device's memory that is planned for: CUDA and NCCL take the rest, or it is lost to fragmentation."""

_FEW_BLOCKS = 2
_MOST = 1024  # images that keep every device busy, whatever the model


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


def fitting_micro_batch(recipe: Recipe, num_classes: int, world_size: int, device_bytes: float) -> int:
    """The largest micro-batch up to 1,024 images with which a rank fits into a CUDA device with so much memory.

    It divides the rank's part of the global batch. If none is expected to fit, the smallest.
    """
    micro, accumulation = recipe.split(world_size)
    per_rank, together = micro * accumulation, recipe.objective.together
    sizes = [size for size in range(together, min(per_rank, _MOST) + 1, together) if per_rank % size == 0]
    parameters, tensors = model_parameters(recipe, num_classes), tensors_by_micro_batch(recipe, num_classes, sizes[-1])

    def fits(size: int) -> bool:
        memory = memory_of(recipe, parameters, tensors(size), world_size, size < per_rank, "cuda")
        return memory.device_bytes <= USABLE * device_bytes

    return max((size for size in sizes if fits(size)), default=sizes[0])


def tensors_by_micro_batch(recipe: Recipe, num_classes: int, largest: int) -> Callable[[int], StepTensors]:
    """A function from a micro-batch, up to `largest` images, to its tensors on CUDA.

    Two micro-batches are counted. Between them the saved bytes are exact. The peak beyond those is the maximum of
    several linear functions, so the line between the two points is an upper bound. A single image, which needs fewer
    copies, is treated like the others.
    """
    low, high = 2, max(largest, 3)
    at_low, at_high = (_of_all_blocks(recipe, num_classes, size) for size in (low, high))

    def between(micro_batch: int) -> StepTensors:
        part = (micro_batch - low) / (high - low)
        saved = at_low.saved + part * (at_high.saved - at_low.saved)
        transient = at_low.transient + max(0.0, part) * (at_high.transient - at_low.transient)
        return StepTensors(round(saved), round(transient))

    return between


def _of_all_blocks(recipe: Recipe, num_classes: int, micro_batch: int) -> StepTensors:
    """The tensors of a model with all its blocks. If there are many, two models with few blocks are counted instead.

    Every pair of blocks saves as much as any other pair.
    """
    blocks = recipe.model.num_blocks
    few = _FEW_BLOCKS + blocks % 2
    if blocks <= few + 2 or recipe.parallelism.activation_checkpointing > 2:
        return step_tensors(recipe, num_classes, micro_batch, "cuda")
    less, more = (
        step_tensors(_with_blocks(recipe, count), num_classes, micro_batch, "cuda") for count in (few, few + 2)
    )
    saved = less.saved + (more.saved - less.saved) * (blocks - few) // 2
    return StepTensors(saved, more.transient)


def _with_blocks(recipe: Recipe, count: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.with_blocks(count)})
