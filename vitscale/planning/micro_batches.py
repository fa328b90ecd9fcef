"""The tensors of every micro-batch, interpolated from a few: they grow linearly with images and blocks."""

from collections.abc import Callable

from vitscale.planning.tensors import StepTensors, step_tensors
from vitscale.recipe import Recipe

_FEW_BLOCKS = 2


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
