"""The memory that one rank of a training run will need, by part, in bytes.

Parameters, gradients and optimizer state follow from what DeepSpeed 0.19 was observed to hold in each ZeRO stage (a
test compares them with an engine's own tensors); `tensors` counts the activations. A step can peak at two moments: the
end of the forward pass, when all activations are saved, and the optimizer's update, when all gradients exist.

On the CPU the C library does not return the memory of one moment before the other needs its own, so all parts add up;
ViT-B/16 was measured to take between 14 % less and 8 % more than that. On CUDA the allocator reuses blocks; what it
loses to fragmentation is not counted, and nothing here was measured there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitscale.models.layers import CHANNELS
from vitscale.recipe import Recipe
from vitscale.training.beginning.parameters import Parameters, model_parameters
from vitscale.training.beginning.tensors import DeviceType, StepTensors, step_tensors
from vitscale.training.deepspeed.bucket_sizes import MOST_UNDER_WAY, elements_in_flight

_CPU_RUNTIME = 160 << 20  # threads, kernels and buffers of libraries, measured from the imports to the third step
_BATCHES_BESIDE_PREFETCH = 3  # one in the planner's hands, one awaited, one in use
_BATCHES_ON_CUDA = 3  # see `on_device` of data/loader.py
ALL_REDUCE_ELEMENTS = 500_000_000  # elements that DeepSpeed sums at once in stage 0


@dataclass(frozen=True)
class Memory:
    """The memory of one rank, in bytes.

    Attributes:
        device: the kind of device that holds all parts but those called `host_`.
        weights: the weights that the model computes with (under ZeRO 3 the rank's share, with hpZ its share of the
            node's copy, and small ones whole), and a teacher's weights.
        optimizer: fp32 masters and moments of the trained parameters.
        ema: the moving average of the masters.
        images: batches on a CUDA device.
        runtime: what libraries take for themselves on the CPU; 0 on CUDA, where it is already missing from the memory
            that a device reports as available.
        activations: what is saved for the backward pass.
        workspace: what the backward pass needs besides: temporary tensors, reduction buckets, gathered parameters.
        accumulated: gradients summed over micro-batches, held during the backward pass.
        gradients: all gradients when the update begins, including the accumulated ones.
        update: what the update needs besides: fp32 copies of gradients.
        host_optimizer: offloaded state, and the fp32 values of frozen parameters.
        host_loader: prefetched batches.
        host_checkpoint: the copy that is written in the background.
    """

    device: DeviceType
    weights: int
    optimizer: int
    ema: int
    images: int
    runtime: int
    activations: int
    workspace: int
    accumulated: int
    gradients: int
    update: int
    host_optimizer: int
    host_loader: int
    host_checkpoint: int

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
    recipe: Recipe,
    num_classes: int,
    world_size: int,
    micro_batch: int | None = None,
    device: DeviceType = "cpu",
) -> Memory:
    """The memory of one rank of `world_size` that trains `recipe`.

    Args:
        micro_batch: the number of images that a rank computes at once; None for the recipe's.

    Raises `RecipeError` if the ranks do not divide the global batch.
    """
    micro, accumulation = recipe.split(world_size)
    if micro_batch is not None:
        micro, accumulation = micro_batch, -(-micro * accumulation // micro_batch)
    tensors = step_tensors(recipe, num_classes, micro, device)
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
    memory = _model_states(recipe, parameters, world_size, accumulates, device)
    per_batch = recipe.batch.global_size // world_size * recipe.data.image_size**2 * CHANNELS
    return replace(
        memory,
        images=_BATCHES_ON_CUDA * per_batch if device == "cuda" else 0,
        runtime=_CPU_RUNTIME if device == "cpu" else 0,
        activations=tensors.saved,
        workspace=memory.workspace + tensors.transient,
        host_loader=(recipe.data.prefetch + _BATCHES_BESIDE_PREFETCH) * _pinned(per_batch, device),
    )


def largest_micro_batch(
    recipe: Recipe, num_classes: int, world_size: int, available_bytes: int, device: DeviceType = "cpu"
) -> int | None:
    """The largest micro-batch, up to the recipe's, that needs at most `available_bytes`; None if none does."""
    micro, accumulation = recipe.split(world_size)
    per_rank = micro * accumulation
    for size in range(micro, 0, -1):
        if per_rank % size == 0 and size % recipe.objective.together == 0:
            memory = expected_memory(recipe, num_classes, world_size, size, device)
            if memory.device_bytes <= available_bytes:
                return size
    return None


def _model_states(
    recipe: Recipe, parameters: Parameters, world_size: int, accumulates: bool, device: DeviceType
) -> Memory:
    """The parts that follow from the number of parameters: a `Memory` without those that depend on the micro-batch."""
    sizes, trained = parameters.sizes, parameters.trained
    total, largest = sum(trained), max(sizes)
    frozen = math.ceil((sum(sizes) - total) / world_size)
    stage, is_bf16 = recipe.parallelism.zero_stage, recipe.precision != "fp32"
    elements = elements_in_flight(recipe)
    word = 2 if is_bf16 else 4
    share = optimizer_share(trained, stage, world_size)
    has_masters = stage > 0 or is_bf16
    held = share * parameters.kept_bytes // total  # the mean over all parameters
    ema_word = 4 if recipe.ema is not None else 0
    copied_word = 4 + ema_word if recipe.checkpoint.background else 0
    per_rank = math.ceil(total / world_size)
    copied_moments = 4 * per_rank * parameters.kept // total if recipe.checkpoint.background else 0
    copied_frozen_word = 4 + ema_word if recipe.checkpoint.background else 0

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
        optimizer=held + 4 * has_masters * share,
        ema=ema_word * share,
        images=0,
        runtime=0,
        activations=0,
        workspace=workspace,
        accumulated=accumulated,
        gradients=gradients,
        update=update + working,
        host_optimizer=4 * frozen,
        host_loader=0,
        host_checkpoint=_pinned(copied_word * per_rank + copied_moments + copied_frozen_word * frozen, device),
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
        workspace=workspace + (2 * word * largest if stage < 3 else 0),
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
