"""The tensors of every micro-batch from those of a few: what is saved grows evenly with the images and the blocks."""

from collections.abc import Callable

from vitscale.planning.tensors import StepTensors, step_tensors
from vitscale.recipe import Recipe

_FEW_BLOCKS = 2


def tensors_by_micro_batch(recipe: Recipe, num_classes: int, largest: int) -> Callable[[int], StepTensors]:
    """Micro-batch -> its tensors on CUDA, up to `largest`.

    Counted are two micro-batches. Between them what is saved is exact; the peak beyond it, a largest of several things
    that grow evenly, is at most what the line says. A single image, which needs fewer copies, is given as others are.
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
    """Counted on two models of few blocks, where there are many: each pair of blocks saves as much as another."""
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
