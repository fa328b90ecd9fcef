"""How long a step should take: computing, updating, and what of the network's time nothing else hides.

A model on paper. It knows no slow rank and no data that comes late; kernels have one efficiency whatever
the micro-batch. All of this makes real steps longer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vitscale.flops.accounting import FLOPS_PER_MAC, training_flops_per_image
from vitscale.flops.work import Work
from vitscale.planning.cluster import Cluster
from vitscale.planning.collective_time import CollectiveTime, collective_time
from vitscale.planning.communication import Collective, Phase
from vitscale.planning.memory import elements_in_flight, optimizer_share
from vitscale.planning.parameters import Parameters
from vitscale.recipe import Recipe

HIDDEN = 0.5
"""Of the time in which messages could be under way while something is computed, the share that is used."""

OVERLAPPED = 0.8
"""The same with `parallelism.overlap`, of the backward pass for gradients and of the forward pass for weights; the last
bucket of gradients and the first of weights apart, behind which nothing is computed. benchmarks/network.py measured it,
where compute and network do not share a device.
"""

_BACKWARD = 2 / 3  # of the model's FLOPs


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute: forward and backward passes, without what is recomputed.
        recompute: once more.
        update: of the optimizer; 0 where the device's bandwidth is not known, and for an offloaded optimizer.
        network: that messages are under way.
        latency: of it, what would stay were all messages empty.
        waiting: for them, while nothing is computed.
    """

    compute: float
    recompute: float
    update: float
    network: float
    latency: float
    waiting: float

    @property
    def total(self) -> float:
        """Of the step."""
        return self.compute + self.recompute + self.update + self.waiting


def step_time(
    recipe: Recipe, work: Work, parameters: Parameters, cluster: Cluster, collectives: Iterable[Collective]
) -> StepTime:
    """The time of one step of `recipe` on `cluster`, which sends `collectives`."""
    images = recipe.batch.global_size / cluster.devices
    rate = cluster.peak * cluster.efficiency
    compute = training_flops_per_image(work.macs) * images / rate
    again = work.recomputed(recipe.parallelism.activation_checkpointing)
    recompute = FLOPS_PER_MAC * again.macs * images / rate
    seconds: dict[Phase, float] = {"passes": 0.0, "backward": 0.0, "update": 0.0}
    latency = 0.0
    for collective in collectives:
        one, count = message_time(collective, cluster), collective.times * collective.messages
        seconds[collective.phase] += count * one.total
        latency += count * one.latency
    in_passes = seconds["passes"] + seconds["backward"]
    if recipe.parallelism.overlap and recipe.parallelism.zero_stage in (1, 2):
        hidden = _overlapped(recipe, parameters, cluster.devices, seconds, compute, recompute)
    else:
        hidden = min(in_passes, _hides(recipe, cluster.devices, compute, recompute))
    return StepTime(
        compute=compute,
        recompute=recompute,
        update=_update(recipe, parameters, cluster),
        network=in_passes + seconds["update"],
        latency=latency,
        waiting=in_passes - hidden + seconds["update"],
    )


def message_time(collective: Collective, cluster: Cluster) -> CollectiveTime:
    """The time of one message of a collective."""
    size = collective.elements * collective.element_bytes / collective.messages
    return collective_time(collective.kind, size, cluster)


def overlaps(recipe: Recipe) -> bool:
    """Whether ranks send while they compute: DeepSpeed by itself in stage 3 alone, nothing in stage 0."""
    stage = recipe.parallelism.zero_stage
    if recipe.parallelism.overlap:
        return stage > 0
    asked = recipe.deepspeed.get("zero_optimization", {}).get("overlap_comm")
    return stage > 0 and bool(stage == 3 if asked is None else asked)


def _hides(recipe: Recipe, world_size: int, compute: float, recompute: float) -> float:
    """Seconds of messages that take no time of their own."""
    if not overlaps(recipe):
        return 0.0
    if recipe.parallelism.zero_stage == 3:
        return HIDDEN * (compute + recompute)
    # Gradients alone, and in stage 1 only those of the last micro-batch.
    _, accumulation = recipe.split(world_size)
    backward = _BACKWARD * compute + recompute
    return HIDDEN * backward / (accumulation if recipe.parallelism.zero_stage == 1 else 1)


def _overlapped(
    recipe: Recipe,
    parameters: Parameters,
    world_size: int,
    seconds: Mapping[Phase, float],
    compute: float,
    recompute: float,
) -> float:
    """Seconds of messages that take no time of their own, where buckets are sent as soon as they are full."""
    stage, (_, accumulation) = recipe.parallelism.zero_stage, recipe.split(world_size)
    bucket = min(1.0, elements_in_flight(recipe)["reduce_bucket_size"] / sum(parameters.trained))
    times = accumulation if stage == 2 else 1
    backward = (_BACKWARD * compute + recompute) / accumulation * times  # stage 1 sends in the last one alone
    forward = (1 - _BACKWARD) * compute / accumulation  # new weights are awaited in the first one alone
    gradients, weights = seconds["backward"] * (1 - bucket / times), seconds["passes"] * (1 - bucket)
    return min(gradients, OVERLAPPED * backward) + min(weights, OVERLAPPED * forward)


def _update(recipe: Recipe, parameters: Parameters, cluster: Cluster) -> float:
    """The optimizer reads and writes its state, reads gradients and writes weights: as fast as memory is."""
    if cluster.device.board.bandwidth is None or recipe.parallelism.offload != "none":
        return 0.0
    word = 4 if recipe.precision == "fp32" else 2
    bytes_each = 2 * (parameters.kept_bytes / sum(parameters.trained) + 4) + 4 + word
    share = optimizer_share(parameters.trained, recipe.parallelism.zero_stage, cluster.devices)
    return bytes_each * share / cluster.device.board.bandwidth
