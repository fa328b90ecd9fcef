"""Running out of memory: one message, with the micro-batch that should fit, in place of an allocator's trace."""

import torch

from vitscale.errors import OutOfMemoryError
from vitscale.recipe import Recipe
from vitscale.training.distributed import World
from vitscale.training.plan import Plan


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: only CUDA's has a class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(recipe: Recipe, plan: Plan, world: World) -> OutOfMemoryError:
    """The error of a rank that has run out of memory."""
    raise NotImplementedError
