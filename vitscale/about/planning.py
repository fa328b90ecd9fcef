"""Plans a recipe on a cluster: the memory of every way to distribute it, and the totals of a run at a given MFU.

Memory follows from what DeepSpeed was observed to hold. Time and price follow from the MFU alone, which is given or
assumed: nothing here predicts how fast a cluster is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitscale.data.shards import Manifest
from vitscale.flops.accounting import PUBLISHED_MFU, PUBLISHED_MFU_SOURCE, cost_row, training_hours
from vitscale.flops.estimate import Estimate
from vitscale.flops.hardware import Device
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.recipe import Recipe
from vitscale.recipe.schema import Parallelism
from vitscale.training.beginning.memory import USABLE, Memory, memory_of, tensors_by_micro_batch
from vitscale.training.beginning.tensors import Parameters, model_parameters

DEVICES_PER_NODE = 8
STAGES = (0, 1, 2, 3)
RECOMPUTATIONS = (0, 1, 2)
_MANY = 8
_IMAGE_BYTES = 110_000


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal devices, and the utilisation that is assumed of them."""

    device: Device
    devices: int  # of all nodes
    nodes: int
    memory: float  # bytes of one device
    mfu: float
    assumptions: tuple[str, ...] = ()  # what was assumed because it was not given, in words
    price: float | None = None  # of one device for one hour

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nodes


@dataclass(frozen=True)
class Choice:
    """One way to distribute a recipe, and the memory of one rank."""

    parallelism: Parallelism
    micro_batch: int
    accumulation: int
    memory: Memory
    fits: bool  # into a device's memory
    verdict: str = ""  # `best`, or why it does not fit

    def settings(self) -> list[str]:
        """The arguments of `--set` that make a recipe use this choice."""
        return [
            f"parallelism.zero_stage={self.parallelism.zero_stage}",
            f"parallelism.activation_checkpointing={self.parallelism.activation_checkpointing}",
            f"batch.micro_max={self.micro_batch}",
        ]


@dataclass(frozen=True)
class Totals:
    """The totals of a run at the cluster's MFU, on all devices together; None for what is not known.

    They are the whole run's, or for a branch, those after its trunk, without evaluations and interruptions.
    """

    images: int | None
    steps: int | None
    days: float | None
    exaflops: float | None
    device_hours: float | None
    energy_kwh: float | None
    cost: float | None
    images_per_s: float  # of all devices together
    loader_images_per_s: float  # that each node has to decode
    storage_bytes_per_s: float  # that each node has to read
    checkpoint_bytes: int


@dataclass(frozen=True)
class ClusterPlan:
    """All choices, the best one, the run's totals, and what was assumed."""

    name: str
    cluster: Cluster
    parameters: int
    choices: tuple[Choice, ...]
    totals: Totals
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Choice | None:
        """The best choice; None if nothing fits."""
        return next((choice for choice in self.choices if choice.verdict == "best"), None)


def make_cluster(
    device: Device,
    devices: int,
    *,
    nodes: int | None = None,
    memory: float | None = None,
    mfu: float | None = None,
    price: float | None = None,
) -> Cluster:
    """A cluster from what is known about it; the rest is assumed and listed. Memory in bytes.

    Raises `RecipeError` for a device without bf16, for unknown memory, and for devices that do not fill equal nodes.
    """
    if "bf16" not in device.peak:
        raise RecipeError(f"--hardware {device.name}: it has no matrix units for bf16, in which runs are planned")
    if memory is None and device.memory is None:
        raise RecipeError(f"--hardware {device.name}: is sold with several sizes of memory; give --memory GB")
    assumed = []
    if nodes is None:
        nodes = -(-devices // DEVICES_PER_NODE)
        if devices > 1:
            assumed.append(f"{devices // nodes} devices a node (--nodes)")
    if devices % nodes:
        raise RecipeError(f"--devices {devices} does not divide by {nodes} nodes: give --nodes")
    if mfu is None:
        assumed.append(f"{PUBLISHED_MFU:.0%} MFU, {PUBLISHED_MFU_SOURCE} (--mfu)")
    memory, mfu = memory or device.memory or 0.0, mfu or PUBLISHED_MFU
    return Cluster(device, devices, nodes, memory, mfu, tuple(assumed), price)


def make_plan(estimate: Estimate, cluster: Cluster) -> ClusterPlan:
    """Work out every choice for an estimated recipe on a cluster.

    Raises `RecipeError` for fp32, if the devices do not divide the global batch, and if `hpz_size` does not divide the
    devices of a node.
    """
    if estimate.recipe.precision == "auto":  # what `auto` chooses on every device with a known peak
        estimate = replace(estimate, recipe=estimate.recipe.model_copy(update={"precision": "bf16"}))
    recipe, num_classes = estimate.recipe, estimate.num_classes
    assert num_classes is not None, "the caller has checked that the classes are known"
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
            for micro in sizes:
                one = _with(recipe, stage, again, micro)
                accumulates = recipe.batch.global_size > micro * cluster.devices
                memory = memory_of(one, parameters, tensors(micro), cluster.devices, accumulates, "cuda")
                fits = memory.device_bytes <= USABLE * cluster.memory
                choices.append(Choice(one.parallelism, *one.split(cluster.devices), memory, fits))
    choices.sort(
        key=lambda one: (one.parallelism.zero_stage, one.parallelism.activation_checkpointing, one.micro_batch)
    )
    best = find_best(choices)
    judged = tuple(replace(one, verdict="best" if one is best else _refusal(one, cluster)) for one in choices)
    totals, assumed = _totals(estimate, cluster, parameters)
    assumptions = (*cluster.assumptions, *_assumed_of_memory(recipe), *assumed)
    return ClusterPlan(estimate.name, cluster, parameters.total, judged, totals, assumptions)


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


def _with(recipe: Recipe, stage: int, again: int, micro_batch: int | None = None) -> Recipe:
    hpz_size = recipe.parallelism.hpz_size if stage == 3 else 1
    update = {"zero_stage": stage, "activation_checkpointing": again, "hpz_size": hpz_size}
    changed = recipe.model_copy(update={"parallelism": recipe.parallelism.model_copy(update=update)})
    if micro_batch is None:
        return changed
    return changed.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_max": micro_batch})})


def find_best(choices: Sequence[Choice]) -> Choice | None:
    """Of the choices that fit, the one that computes and sends least; None if none does.

    First by recomputation (every second block is less than every block), then without ZeRO 3, which gathers weights in
    each pass, then the largest micro-batch, then ZeRO 1, which divides the update and sends as much as ZeRO 0; ZeRO 2
    sends gradients of every micro-batch.
    """

    def effort(one: Choice) -> tuple[float, bool, int, int]:
        every, stage = one.parallelism.activation_checkpointing, one.parallelism.zero_stage
        return 1 / every if every else 0.0, stage == 3, -one.micro_batch, (1, 0, 2, 3).index(stage)

    return min((one for one in choices if one.fits), key=effort, default=None)


def _refusal(choice: Choice, cluster: Cluster) -> str:
    if choice.fits:
        return ""
    return "does not fit" + ("" if choice.memory.device_bytes > cluster.memory else f": {1 - USABLE:.0%} are kept free")


def _totals(estimate: Estimate, cluster: Cluster, parameters: Parameters) -> tuple[Totals, list[str]]:
    recipe, images = estimate.recipe, estimate.own_images
    assert estimate.work is not None, "the caller has checked that the classes are known"
    macs = estimate.work.macs
    peak = cluster.devices * cluster.device.peak["bf16"]
    images_per_s = 1 / (3600 * training_hours(macs, 1, peak, cluster.mfu))
    hours = None if images is None else training_hours(macs, images, peak, cluster.mfu)
    device_hours = None if hours is None else hours * cluster.devices
    cost = cost_row(hours or 0.0, device_hours, cluster.device, cluster.price)
    image_bytes, said = _image_bytes(recipe)
    per_node = images_per_s / cluster.nodes
    weights = (1 + len(recipe.all_averages)) * parameters.total
    totals = Totals(
        images=images,
        steps=estimate.own_steps,
        days=None if hours is None else hours / 24,
        exaflops=estimate.own_exaflops,
        device_hours=device_hours,
        energy_kwh=cost["energy_kwh"],
        cost=cost["cost"],
        images_per_s=images_per_s,
        loader_images_per_s=per_node,
        storage_bytes_per_s=per_node * image_bytes,
        checkpoint_bytes=4 * (weights + parameters.kept),
    )
    return totals, [said] if said else []


def _image_bytes(recipe: Recipe) -> tuple[float, str]:
    """(mean size of a stored image in bytes, what was assumed if there is no manifest to tell, else "")."""
    try:
        shards = Manifest.load(recipe.dataset_path(recipe.data.train)).shards
    except VitscaleError:
        return _IMAGE_BYTES, f"{_IMAGE_BYTES / 1000:g} kB a stored image, as in ImageNet: no {recipe.data.train} here"
    return sum(shard.bytes for shard in shards) / max(1, sum(shard.samples for shard in shards)), ""


def _assumed_of_memory(recipe: Recipe) -> list[str]:
    said = [f"{1 - USABLE:.0%} of the memory stay free, for CUDA, NCCL and fragments"]
    if recipe.parallelism.activation_budget is not None:
        said.append("all activations are kept: what parallelism.activation_budget saves and recomputes is not counted")
    return said
