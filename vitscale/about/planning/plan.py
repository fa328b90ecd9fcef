"""Plans a recipe on a cluster: every way to distribute it, the memory and time of each, and totals for the best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from vitscale.about.planning.cluster import GB, Cluster
from vitscale.about.planning.communication import Collective, communication
from vitscale.about.planning.failures import Failures, Saving
from vitscale.about.planning.step_time import HIDDEN, OVERLAPPED, StepTime, overlaps, step_time
from vitscale.data.shards import Manifest
from vitscale.flops.accounting import cost_row, mfu
from vitscale.flops.estimate import Estimate
from vitscale.flops.work import Work
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.recipe import Recipe
from vitscale.recipe.schema import Parallelism
from vitscale.training.beginning.memory import USABLE, Memory, memory_of, tensors_by_micro_batch
from vitscale.training.beginning.tensors import Parameters, model_parameters

STAGES = (0, 1, 2, 3)
RECOMPUTATIONS = (0, 1, 2)
STORAGE = 2 * GB
_AS_FAST = 0.01  # relative differences below this are less than the model can resolve
_MANY = 8
_SPARES = 3
_IMAGE_BYTES = 110_000
_HOST_COPY = 10 * GB


@dataclass(frozen=True)
class Choice:
    """One way to distribute a recipe: the memory of one rank, the collectives and the time of one step."""

    parallelism: Parallelism
    micro_batch: int
    accumulation: int
    memory: Memory
    collectives: tuple[Collective, ...]
    time: StepTime
    images_per_s: float  # of all devices together
    mfu: float
    fits: bool  # into a device's memory
    verdict: str = ""  # `best`, or why it is not, in words

    @property
    def is_best(self) -> bool:
        return self.verdict == "best"

    @property
    def way_to_send(self) -> tuple[int, bool, int]:
        """(ZeRO stage, `overlap`, `hpz_size`)."""
        return self.parallelism.zero_stage, self.parallelism.overlaps, self.parallelism.hpz_size

    def settings(self) -> list[str]:
        """The arguments of `--set` that make a recipe use this choice."""
        stage, overlap, hpz_size = self.way_to_send
        return [
            f"parallelism.zero_stage={stage}",
            *([f"parallelism.overlap={str(overlap).lower()}"] if stage in (1, 2) else []),
            *([f"parallelism.hpz_size={hpz_size}"] if hpz_size > 1 else []),
            f"parallelism.activation_checkpointing={self.parallelism.activation_checkpointing}",
            f"batch.micro_max={self.micro_batch}",
        ]


@dataclass(frozen=True)
class Totals:
    """The totals of a run with the best choice, on all devices together; None for what is not known.

    They are the whole run's, or for a branch, those after its trunk, without evaluations and interruptions.
    """

    images: int | None
    steps: int | None
    days: float | None
    exaflops: float | None
    device_hours: float | None
    energy_kwh: float | None
    cost: float | None
    loader_images_per_s: float  # that each node has to decode
    storage_bytes_per_s: float  # that each node has to read
    checkpoint_bytes: int
    checkpoint_s: float  # to write one
    stall_s: float  # that training waits for it
    checkpoint_every_s: float | None


@dataclass(frozen=True)
class WithSpares:
    """A run's totals with failures and spare nodes, if it saves at the best interval."""

    spares: int  # nodes besides those that compute
    useful: float  # the share of the time that advances the run
    days: float | None  # with failures and waiting for nodes; None if the length is not known or it never ends
    device_hours: float | None  # of all nodes, including spares; None as above


@dataclass(frozen=True)
class Goodput:
    """What failures cost a run."""

    failure_every_s: float  # the mean time between two failures of any node
    # The share of the time that advances the run, without spares and if it saves as the recipe says; None if that is
    # not known.
    useful: float | None
    best_every_s: float  # the time between two checkpoints that maximises this share
    best_every_steps: int
    by_spares: tuple[WithSpares, ...]  # with 0, 1, 2 and 3 spare nodes


@dataclass(frozen=True)
class ClusterPlan:
    """All choices, the best one's totals, and what was assumed; `goodput` only if failures were given."""

    name: str
    cluster: Cluster
    parameters: int
    choices: tuple[Choice, ...]
    totals: Totals | None
    assumptions: tuple[str, ...]
    goodput: Goodput | None = None

    @property
    def best(self) -> Choice | None:
        """The best choice; None if nothing fits."""
        return next((choice for choice in self.choices if choice.is_best), None)


def make_plan(estimate: Estimate, cluster: Cluster, failures: Failures | None = None) -> ClusterPlan:
    """Work out every choice for an estimated recipe on a cluster.

    Raises `RecipeError` for fp32, if the devices do not divide the global batch, and if `hpz_size` does not divide the
    devices of a node.
    """
    if estimate.recipe.precision == "auto":  # what `auto` chooses on every device with a known peak
        estimate = replace(estimate, recipe=estimate.recipe.model_copy(update={"precision": "bf16"}))
    recipe, work, num_classes = estimate.recipe, estimate.work, estimate.num_classes
    assert work is not None and num_classes is not None, "the caller has checked that the classes are known"
    if recipe.precision != "bf16":
        raise RecipeError(
            f"precision: {recipe.precision} cannot be planned: its peak FLOP/s are not known; --set precision=bf16"
        )
    hpz_size, per_node = recipe.parallelism.hpz_size, cluster.devices_per_node
    if hpz_size > 1 and per_node % hpz_size:
        raise RecipeError(
            f"parallelism.hpz_size: {hpz_size} does not divide the {per_node} devices of a node; set it to {per_node}"
        )
    parameters = model_parameters(recipe, num_classes)
    sizes = _micro_batches(recipe, cluster.devices)
    choices = []
    for again in RECOMPUTATIONS:
        tensors = tensors_by_micro_batch(_with(recipe, recipe.parallelism.zero_stage, again), num_classes, sizes[-1])
        for stage in STAGES:
            divides = recipe.parallelism.offload != "none" or recipe.parallelism.overlaps
            if (stage == 0 and divides) or (stage == 3 and recipe.parallelism.compiles):
                continue  # recipes refuse these combinations
            for micro, (overlap, hpz_size) in product(sizes, _ways_to_send(recipe, stage, cluster)):
                one = _with(recipe, stage, again, micro, overlap=overlap, hpz_size=hpz_size)
                accumulates = recipe.batch.global_size > micro * cluster.devices
                memory = memory_of(one, parameters, tensors(micro), cluster.devices, accumulates, "cuda")
                choices.append(_choice(one, work, parameters, cluster, memory))
    choices.sort(key=lambda one: (*one.way_to_send, one.parallelism.activation_checkpointing, one.micro_batch))
    best = find_best(choices)
    judged = tuple(replace(one, verdict=_verdict(one, best, cluster)) for one in choices)
    assumptions = [*cluster.assumptions, *_assumed_of_time(recipe, cluster)]
    totals = goodput = None
    if best is not None:
        totals, assumed = _totals(estimate, cluster, best, parameters)
        assumptions += assumed
        if failures is not None:
            goodput = _goodput(totals, best, cluster, failures)
            assumptions += failures.assumptions
    return ClusterPlan(estimate.name, cluster, parameters.total, judged, totals, tuple(assumptions), goodput)


# ---- Choices ---------------------------------------------------------------------------------------------------------


def _micro_batches(recipe: Recipe, world_size: int) -> list[int]:
    """The micro-batches to try: divisors of a rank's part of the global batch.

    If there are many, only powers of two, the recipe's own and the whole part. None splits images that the objective
    computes together.
    """
    micro, _ = recipe.split(world_size)
    divisors = recipe.micro_batches(world_size)
    if len(divisors) <= _MANY:
        return divisors
    return [size for size in divisors if size & (size - 1) == 0 or size in (micro, divisors[-1])]


def _ways_to_send(recipe: Recipe, stage: int, cluster: Cluster) -> list[tuple[bool, int]]:
    """The values of (`overlap`, `hpz_size`) to try: all that would make a difference, unless the recipe sets them."""
    overlap, hpz_size = recipe.parallelism.overlaps, recipe.parallelism.hpz_size
    possible = cluster.devices > 1 and recipe.parallelism.offload == "none"
    if stage in (1, 2):
        return [(False, 1), (True, 1)] if possible and not overlap else [(overlap, 1)]
    if stage == 3 and possible and hpz_size == 1 and cluster.nodes > 1 and cluster.devices_per_node > 1:
        return [(overlap, 1), (overlap, cluster.devices_per_node)]
    return [(overlap, hpz_size if stage == 3 else 1)]


def _with(recipe: Recipe, stage: int, again: int, micro_batch: int | None = None, **sending: int) -> Recipe:
    update = {"zero_stage": stage, "activation_checkpointing": again, **sending}
    changed = recipe.model_copy(update={"parallelism": recipe.parallelism.model_copy(update=update)})
    if micro_batch is None:
        return changed
    return changed.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_max": micro_batch})})


def _choice(recipe: Recipe, work: Work, parameters: Parameters, cluster: Cluster, memory: Memory) -> Choice:
    micro, accumulation = recipe.split(cluster.devices)
    collectives = tuple(communication(recipe, parameters, cluster.devices, accumulation)) if cluster.devices > 1 else ()
    time = step_time(recipe, work, parameters, cluster, collectives)
    images_per_s = recipe.batch.global_size / time.total
    utilisation = mfu(images_per_s, work.macs, cluster.devices, cluster.peak)
    assert utilisation is not None
    fits = memory.device_bytes <= USABLE * cluster.memory
    return Choice(recipe.parallelism, micro, accumulation, memory, collectives, time, images_per_s, utilisation, fits)


def find_best(choices: Sequence[Choice]) -> Choice | None:
    """The fastest choice that fits; of equally fast ones that with the largest micro-batch, then the simplest.

    That is the lowest stage, which sends the fewest messages, any of which could be late, without overlap and hpZ.
    """
    fitting = [one for one in choices if one.fits]
    limit = min((one.time.total for one in fitting), default=0.0) * (1 + _AS_FAST)
    as_fast = [one for one in fitting if one.time.total <= limit]
    return min(as_fast, key=lambda one: (-one.micro_batch, *one.way_to_send), default=None)


def _verdict(choice: Choice, best: Choice | None, cluster: Cluster) -> str:
    if choice is best:
        return "best"
    needs, has = choice.memory.device_bytes / GB, cluster.memory / GB
    if not choice.fits:
        return "does not fit" + ("" if needs > has else f": {1 - USABLE:.0%} are kept free")
    assert best is not None, "what fits is compared with the best of what fits"
    slower = choice.time.total / best.time.total - 1
    if slower > _AS_FAST:
        return f"{slower:.0%} slower: {_reason(choice.time, best.time)}"
    if choice.micro_batch < best.micro_batch:
        return "as fast, smaller micro-batches"
    return "as fast" + (", more messages" if choice.way_to_send[0] > best.way_to_send[0] else "")


def _reason(time: StepTime, best: StepTime) -> str:
    """The part of a step's time that exceeds the best choice's by most."""
    parts = {
        "recomputes": time.recompute - best.recompute,
        "network": time.waiting - best.waiting,
        "update": time.update - best.update,
    }
    return max(parts, key=lambda part: parts[part])


# ---- The whole run ---------------------------------------------------------------------------------------------------


def _totals(estimate: Estimate, cluster: Cluster, best: Choice, parameters: Parameters) -> tuple[Totals, list[str]]:
    """The totals of the best choice, and what was assumed for them, in words."""
    recipe = estimate.recipe
    images = estimate.own_images
    seconds = None if images is None else images / best.images_per_s
    hours = None if seconds is None else seconds / 3600
    device_hours = None if hours is None else hours * cluster.devices
    cost = cost_row(hours or 0.0, device_hours, cluster.device, cluster.price)
    image_bytes, said = _image_bytes(recipe)
    per_node = best.images_per_s / cluster.nodes
    weights = (1 + len(recipe.all_averages)) * parameters.total
    size = 4 * (weights + parameters.kept)
    writes = size / (cluster.storage or STORAGE)
    assumed = [said] if said else []
    if cluster.storage is None:
        assumed.append(f"{STORAGE / GB:g} GB/s at which all nodes together write checkpoints (--storage)")
    if recipe.checkpoint.background:
        assumed.append(f"{_HOST_COPY / GB:g} GB/s from each device to host memory")
    every, save_every_s = recipe.checkpoint.every, None
    if every is None:
        save_every_s = recipe.checkpoint.default_every_s
    elif steps := every.to_steps(estimate.samples or 0, recipe.batch.global_size):
        save_every_s = steps * best.time.total
    totals = Totals(
        images=images,
        steps=estimate.own_steps,
        days=None if seconds is None else seconds / 86400,
        exaflops=estimate.own_exaflops,
        device_hours=device_hours,
        energy_kwh=cost["energy_kwh"],
        cost=cost["cost"],
        loader_images_per_s=per_node,
        storage_bytes_per_s=per_node * image_bytes,
        checkpoint_bytes=size,
        checkpoint_s=writes,
        stall_s=size / cluster.devices / _HOST_COPY if recipe.checkpoint.background else writes,
        checkpoint_every_s=save_every_s,
    )
    return totals, assumed


def _goodput(totals: Totals, best: Choice, cluster: Cluster, failures: Failures) -> Goodput:
    saving = Saving(totals.stall_s, max(totals.stall_s, totals.checkpoint_s))
    steps = math.ceil(failures.best_interval(saving) / best.time.total)
    every = steps * best.time.total
    rows = []
    for spares in range(_SPARES + 1):
        useful = failures.useful(every, saving, spares)
        days = None if totals.days is None or useful == 0 else totals.days / useful
        nodes = cluster.nodes + spares
        hours = None if days is None else 24 * days * nodes * cluster.devices_per_node
        rows.append(WithSpares(spares, useful, days, hours))
    now = totals.checkpoint_every_s
    return Goodput(
        failure_every_s=1 / failures.rate,
        useful=None if now is None else failures.useful(max(now, saving.write), saving),
        best_every_s=every,
        best_every_steps=steps,
        by_spares=tuple(rows),
    )


def _image_bytes(recipe: Recipe) -> tuple[float, str]:
    """(mean size of a stored image in bytes, what was assumed if there is no manifest to tell, else "")."""
    try:
        shards = Manifest.load(recipe.dataset_path(recipe.data.train)).shards
    except VitscaleError:
        return _IMAGE_BYTES, f"{_IMAGE_BYTES / 1000:g} kB a stored image, as in ImageNet: no {recipe.data.train} here"
    return sum(shard.bytes for shard in shards) / max(1, sum(shard.samples for shard in shards)), ""


def _assumed_of_time(recipe: Recipe, cluster: Cluster) -> list[str]:
    said = [f"{1 - USABLE:.0%} of the memory stay free, for CUDA, NCCL and fragments"]
    if recipe.parallelism.activation_budget is not None:
        said.append("all activations are kept: what parallelism.activation_budget saves and recomputes is not counted")
    if cluster.devices > 1:
        said.append(
            "rings and trees with NCCL's latencies of a hop; the slowest link carries what one rank sends; no slow rank"
        )
        stages = "stage 3, as is DeepSpeed's default (overlap_comm)"
        if recipe.parallelism.overlaps:
            stages = "stage 3"
        elif overlaps(_with(recipe, 2, 0)):
            stages = "stages 1 to 3"
        said.append(f"{HIDDEN:.0%} of the time of computing can hide messages, in {stages}")
        if recipe.parallelism.offload == "none":
            said.append(
                f"with parallelism.overlap {OVERLAPPED:.0%} of it in stages 1 and 2, except for one bucket of "
                "gradients and one of weights: measured between CPUs, never on CUDA"
            )
        if cluster.nodes > 1:
            said.append("no time for the host, which waits at each copy that parallelism.hpz_size makes; never on CUDA")
    if cluster.device.board.bandwidth is None:
        said.append(f"no time for the optimizer's update: the bandwidth of {cluster.device.name} is not known")
    if recipe.parallelism.offload != "none":
        said.append("no time for the offloaded optimizer and its way to the host and back, which may be most of a step")
    if recipe.optimizer.untimed:
        said.append(f"no time for {recipe.optimizer.untimed}")
    said.append("data, evaluations and checkpoints keep nobody waiting")
    return said
