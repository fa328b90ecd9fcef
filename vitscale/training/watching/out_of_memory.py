"""Turns running out of memory into one message with the micro-batch that should fit, not an allocator's trace."""

import os
import resource

import torch

from vitscale.ground.errors import OutOfMemoryError
from vitscale.ground.machine import available_memory
from vitscale.recipe import Recipe
from vitscale.training.beginning.memory import largest_micro_batch
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.beginning.tensors import DeviceType
from vitscale.training.deepspeed.distributed import World


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: only CUDA's has a class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(plan: RunPlan, world: World) -> OutOfMemoryError:
    """The error of a rank that has run out of memory with the plan's micro-batch."""
    per_rank = plan.micro_batch * plan.accumulation
    smaller = max((size for size in range(1, plan.micro_batch) if per_rank % size == 0), default=None)
    fits = None
    if smaller is not None:  # the present one does not fit, whatever is expected of it
        content = plan.recipe.dump()
        content["batch"]["micro_max"] = smaller
        device: DeviceType = "cuda" if world.device.type == "cuda" else "cpu"
        tried = Recipe.model_validate(content)
        fits = largest_micro_batch(tried, plan.num_classes, world.size, _own_memory(world), device)
    advice = (
        "no smaller one is expected to fit: try --set parallelism.activation_checkpointing=1, a higher "
        "parallelism.zero_stage, or more ranks"
    )
    if fits is not None:
        advice = f"{fits} should fit: --set batch.micro_max={fits} changes nothing but the rounding of sums"
    return OutOfMemoryError(
        f"rank {world.rank} is out of memory with micro-batches of {plan.micro_batch} images; {advice}"
    )


def _own_memory(world: World) -> int:
    """Bytes that this rank has allocated, plus those that it can still have."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        return free + torch.cuda.memory_reserved(world.device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = available_memory()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    known = [limit] if limit != resource.RLIM_INFINITY else []
    known += [used + left // local] if left is not None else []
    return min(known, default=used)
