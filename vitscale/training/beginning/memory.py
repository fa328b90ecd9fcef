"""The memory that one rank of a training run will need, by part, in bytes; and the largest micro-batch that fits.

Parameters, gradients and optimizer state follow from what DeepSpeed 0.19 was observed to hold in each ZeRO stage (a
test compares them with an engine's own tensors); `tensors` counts the activations. A step can peak at two moments: the
end of the forward pass, when all activations are saved, and the optimizer's update, when all gradients exist.

On the CPU the C library does not return the memory of one moment before the other needs its own, so all parts add up;
ViT-B/16 was measured to take between 14 % less and 8 % more than that. On CUDA the allocator reuses blocks; what it
loses to fragmentation is not counted, and nothing here was measured there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitscale.data.shards import Manifest
from vitscale.models.layers import CHANNELS
from vitscale.objectives import objective_class
from vitscale.recipe import MICRO_MAX_ON_CPU, Recipe, override, read_recipe
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.beginning.tensors import DeviceType, Parameters, StepTensors, model_parameters, step_tensors
from vitscale.training.deepspeed.config import MOST_UNDER_WAY, elements_in_flight

_CPU_RUNTIME = 160 << 20  # threads, kernels and buffers of libraries, measured from the imports to the third step
_BATCHES_BESIDE_PREFETCH = 3  # one in the planner's hands, one awaited, one in use
_BATCHES_ON_CUDA = 3  # see `on_device` of data/loader.py
USABLE = 0.95
"""The share of a device's memory that is planned for: CUDA and NCCL take the rest, or it is lost to fragmentation."""

_FEW_BLOCKS = 2
_MOST = 1024  # images that keep every device busy, whatever the model
ALL_REDUCE_ELEMENTS = 500_000_000  # elements that DeepSpeed sums at once in stage 0


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in bytes; `device` holds all parts but those called `host_`."""

    device: DeviceType
    weights: int  # for computing (ZeRO 3: the rank's share, its share of hpZ's copy, small ones whole), and a teacher's
    optimizer: int  # fp32 masters and moments of the trained parameters
    ema: int  # the moving average of the masters
    images: int  # batches on a CUDA device
    runtime: int  # what libraries take on the CPU; on CUDA already missing from what a device reports as available
    activations: int  # what is saved for the backward pass
    workspace: int  # what the backward pass needs besides: temporary tensors, reduction buckets, gathered parameters
    accumulated: int  # gradients summed over micro-batches, held during the backward pass
    gradients: int  # all gradients when the update begins, including the accumulated ones
    update: int  # what the update needs besides: fp32 copies of gradients
    host_optimizer: int  # offloaded state, and the fp32 values of frozen parameters
    host_loader: int  # prefetched batches
    host_checkpoint: int  # the copy that is written in the background

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer state: what the device has to hold whatever the micro-batch."""
        on_host = self.host_optimizer if self.device == "cpu" else 0
        return self.weights + self.optimizer + self.ema + self.gradients + self.update + on_host

    @property
    def device_bytes(self) -> int:
        """The peak in the device's memory; on the CPU the peak of everything."""
        always = self.weights + self.optimizer + self.ema + self.images + self.runtime
        backward, update = self.activations + self.workspace, self.gradients + self.update
        if self.device == "cpu":
            return always + backward + max(self.accumulated, update) + self._host
        return always + max(self.accumulated + backward, update)

    @property
    def host_bytes(self) -> int:
        """The peak in host memory beside a CUDA device; 0 on the CPU."""
        return 0 if self.device == "cpu" else self._host

    @property
    def _host(self) -> int:
        return self.host_optimizer + self.host_loader + self.host_checkpoint


def expected_memory(
    recipe: Recipe, num_classes: int, world_size: int, micro_batch: int | None = None, device: DeviceType = "cpu"
) -> Memory:
    """The memory of one rank of `world_size` with micro-batches of `micro_batch` images; None for the recipe's.

    Raises `RecipeError` if the ranks do not divide the global batch.
    """
    micro, accumulation = recipe.split(world_size)
    if micro_batch is not None:
        micro, accumulation = micro_batch, -(-micro * accumulation // micro_batch)
    tensors = step_tensors(recipe, num_classes, micro, device, world_size)
    return memory_of(recipe, model_parameters(recipe, num_classes), tensors, world_size, accumulation > 1, device)


def memory_of(
    recipe: Recipe,
    parameters: Parameters,
    tensors: StepTensors,
    world_size: int,
    accumulates: bool,
    device: DeviceType = "cpu",
) -> Memory:
    """As `expected_memory`, for callers that already have the model's parameters and a micro-batch's tensors."""
    sizes, trained = parameters.sizes, parameters.trained
    total = sum(trained)
    frozen = math.ceil((sum(sizes) - total) / world_size)
    stage, is_bf16 = recipe.parallelism.zero_stage, recipe.precision != "fp32"
    elements = elements_in_flight(recipe)
    word = 2 if is_bf16 else 4
    share = optimizer_share(trained, stage, world_size)
    kept = share * parameters.kept_bytes // total  # the mean over all parameters
    ema_word = 4 * len(recipe.all_averages)
    per_rank = math.ceil(total / world_size)
    saved = (4 + ema_word) * (per_rank + frozen) + 4 * per_rank * parameters.kept // total
    pixels = sum(view.count * side**2 for view, side in recipe.data.training_views())
    per_batch = recipe.batch.global_size // world_size * pixels * CHANNELS

    bucket = elements["reduce_bucket_size"] if device == "cuda" else min(elements["reduce_bucket_size"], total)
    is_summed_in_fp32 = (world_size > 1 or accumulates) and recipe.parallelism.reduce_dtype == "fp32"
    in_other_dtype = 4 if is_bf16 and is_summed_in_fp32 else 0
    workspace = bucket * (word + in_other_dtype) if stage > 0 else 0
    weights, accumulated_word = word * sum(sizes), 4 if accumulates else word
    match stage:
        case 0:
            accumulated = 4 * total if accumulates else 0
            gradients = accumulated + word * total if is_bf16 else 4 * total
            flat = min(total, ALL_REDUCE_ELEMENTS) * (word + in_other_dtype) if world_size > 1 else 0
            update = max(4 * total if is_bf16 else 0, flat)
        case 1 | 2 if recipe.parallelism.exchanges and world_size > 1:
            # Gradients go into buckets as they are computed: those being sent, and the one being filled. Beside each
            # bucket is its result: a rank's share, or with gloo everything.
            accumulated = 4 * total if stage == 1 and accumulates else 4 * share
            gradients, update = 4 * share, 0
            sent = min((MOST_UNDER_WAY + 1) * bucket, total)
            sent_word = 4 if recipe.parallelism.reduce_dtype == "fp32" else 2
            workspace = sent_word * (2 * sent if device == "cpu" else sent + sent // world_size)
        case 1 | 2 if world_size == 1 and recipe.parallelism.offload == "none":
            # Without accumulation all gradients are copied to fp32 at once, and dropped when their norm is known.
            accumulated, gradients, update = (4 * total, 4 * total, 0) if accumulates else (0, word * total, 4 * total)
            workspace = 0
        case 1 if accumulates and is_bf16 and recipe.parallelism.offload == "none":
            # DeepSpeed's BF16_Optimizer: a whole fp32 sum besides the gradients, reduced in place.
            accumulated, gradients, update, workspace = 4 * total, 6 * total, 0, 0
        case 1 | 2:
            summed = 4 * total if stage == 1 else accumulated_word * share
            accumulated = summed if accumulates else 0
            gradients = (word if stage == 1 else accumulated_word) * share
            update = 0 if is_bf16 and accumulates else (6 if is_bf16 else 4) * share
        case _:
            kept_whole = [size for size in sizes if size <= elements["stage3_param_persistence_threshold"]]
            persistent = sum(kept_whole) if world_size > 1 else 0
            # From the first forward pass to the end of the update; of small ones only during the update.
            node = recipe.parallelism.hpz_ranks(world_size)
            copy = sum(math.ceil(size / node) for size in sizes if size not in kept_whole) if node > 1 else 0
            weights = word * (optimizer_share(sizes, stage, world_size) + persistent + copy)
            accumulated = gradients = accumulated_word * share
            at_once = min(share, -(-elements["sub_group_size"] // world_size))
            update = (4 if accumulated_word == 4 else 6) * at_once
            gathered = min(sum(sizes) - persistent, elements["stage3_max_live_parameters"]) if world_size > 1 else 0
            workspace += word * gathered
    working = recipe.optimizer.workspace(max(trained, default=0), share, is_divided=stage > 0 and world_size > 1)
    memory = Memory(
        device=device,
        weights=weights + word * parameters.of_teacher,
        optimizer=kept + (4 * share if stage > 0 or is_bf16 else 0),  # and masters
        ema=ema_word * share,
        images=_BATCHES_ON_CUDA * per_batch if device == "cuda" else 0,
        runtime=_CPU_RUNTIME if device == "cpu" else 0,
        activations=tensors.saved,
        workspace=workspace + tensors.transient,
        accumulated=accumulated,
        gradients=gradients,
        update=update + working,
        host_optimizer=4 * frozen,
        host_loader=(recipe.data.prefetch + _BATCHES_BESIDE_PREFETCH) * _pinned(per_batch, device),
        host_checkpoint=_pinned(saved, device) if recipe.checkpoint.background else 0,
    )
    if recipe.parallelism.offload == "none":
        return memory
    # On the host besides the state: fp32 gradients for the update; in stages 1 and 2 a copy of the new weights, in
    # stage 3 the gradients as they arrive; and the sum over micro-batches, which stage 1 in fp32 computes in place.
    arriving = accumulated_word if stage == 3 else word + 4 * (accumulates and (stage == 2 or is_bf16))
    return replace(
        memory,
        optimizer=0,
        ema=0,
        workspace=memory.workspace + (2 * word * max(sizes) if stage < 3 else 0),
        accumulated=accumulated if stage == 1 else 0,
        gradients=0,
        update=0,
        host_optimizer=memory.host_optimizer + memory.optimizer + (ema_word + 4 + arriving) * share,
    )


def _pinned(size: int, device: DeviceType) -> int:
    """The bytes that torch takes for a copy on the host: beside CUDA it is pinned, and a power of two."""
    return 1 << (size - 1).bit_length() if device == "cuda" and size else size


def optimizer_share(sizes: Sequence[int], stage: int, world_size: int) -> int:
    """The number of parameters, with padding, whose optimizer state one rank holds."""
    if stage == 0:
        return sum(sizes)
    if stage == 3:
        return sum(math.ceil(size / world_size) for size in sizes)
    return 2 * math.ceil(sum(sizes) / (2 * world_size))


def largest_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, available_bytes: float, device: DeviceType = "cpu"
) -> int | None:
    """The largest micro-batch, up to the recipe's, that needs at most `available_bytes`; None if none does."""
    most, _ = recipe.split(world_size)
    sizes = [size for size in recipe.micro_batches(world_size) if size <= most]
    memory = ((size, expected_memory(recipe, num_classes, world_size, size, device)) for size in reversed(sizes))
    return next((size for size, needed in memory if needed.device_bytes <= available_bytes), None)


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
    per_rank, sizes = micro * accumulation, [size for size in recipe.micro_batches(world_size) if size <= _MOST]
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
    low = max(2, recipe.objective.together)
    high = max(largest, low + recipe.objective.together)
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
    if not recipe.model.has_equal_blocks or blocks <= few + 2 or recipe.parallelism.activation_checkpointing > 2:
        return step_tensors(recipe, num_classes, micro_batch, "cuda")
    models = [recipe.model.with_blocks(count) for count in (few, few + 2)]
    smaller = [recipe.model_copy(update={"model": model}) for model in models]
    less, more = (step_tensors(one, num_classes, micro_batch, "cuda") for one in smaller)
    return StepTensors(less.saved + (more.saved - less.saved) * (blocks - few) // 2, more.transient)
