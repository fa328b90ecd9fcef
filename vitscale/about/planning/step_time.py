"""How long a step should take: computing, updating, and the network time that computing does not hide.

This is only a model. It has no slow ranks and no late data, and kernels are equally efficient whatever the micro-batch.
Real steps take longer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vitscale.about.planning.cluster import Cluster
from vitscale.about.planning.collective_time import CollectiveTime, collective_time
from vitscale.about.planning.communication import Collective, Phase
from vitscale.flops.accounting import FLOPS_PER_MAC, training_flops_per_image
from vitscale.flops.work import Work
from vitscale.recipe import Recipe
from vitscale.training.beginning.memory import optimizer_share
from vitscale.training.beginning.tensors import Parameters
from vitscale.training.deepspeed.config import elements_in_flight

HIDDEN = 0.5
"""The share of the time in which messages could be sent during computing that is really used for it."""

OVERLAPPED = 0.8
"""The same with `parallelism.overlap`: of the backward pass for gradients and of the forward pass for weights. The last
bucket of gradients and the first of weights, or of a compiled block's weights, do not count, because nothing is
computed while they are sent.
benchmarks/network.py measured it with compute and network on separate devices.
"""

_BACKWARD = 2 / 3  # of the model's FLOPs


@dataclass(frozen=True)
class StepTime:
    """The time of one step, in seconds."""

    compute: float  # the forward and backward passes, without recomputation
    recompute: float
    update: float  # 0 if the device's memory bandwidth is not known, or the optimizer is offloaded
    network: float  # the time during which messages are being sent
    latency: float  # the part of `network` that would remain if all messages were empty
    waiting: float  # the part of `network` during which nothing is computed

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.update + self.waiting


def step_time(
    recipe: Recipe, work: Work, parameters: Parameters, cluster: Cluster, collectives: Iterable[Collective]
) -> StepTime:
    """The time of one step of `recipe` on `cluster` that sends `collectives`."""
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
    if recipe.parallelism.exchanges:
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
    if collective.group is not None:
        cluster = replace(cluster, devices=collective.group, devices_per_node=collective.group)
    return collective_time(collective.kind, size, cluster)


def overlaps(recipe: Recipe) -> bool:
    """Whether ranks send while they compute: by default DeepSpeed does so only in stage 3, and never in stage 0."""
    stage = recipe.parallelism.zero_stage
    if recipe.parallelism.overlaps:
        return stage > 0
    asked = recipe.deepspeed.get("zero_optimization", {}).get("overlap_comm")
    return stage > 0 and bool(stage == 3 if asked is None else asked)


def _hides(recipe: Recipe, world_size: int, compute: float, recompute: float) -> float:
    """The seconds of message time that computing hides."""
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
    """The seconds of message time that computing hides, with buckets that are sent as soon as they are full."""
    stage, (_, accumulation) = recipe.parallelism.zero_stage, recipe.split(world_size)
    total = sum(parameters.trained)
    bucket = min(1.0, elements_in_flight(recipe)["reduce_bucket_size"] / total)
    block = sum(sum(layer.trained) for layer in parameters.layers if layer.block == 0) / total
    # A compiled block waits for all its weights.
    awaited = max(bucket, block) if recipe.parallelism.compiles else bucket
    times = accumulation if stage == 2 else 1
    backward = (_BACKWARD * compute + recompute) / accumulation * times  # stage 1 sends only in the last one
    forward = (1 - _BACKWARD) * compute / accumulation  # new weights are awaited only in the first one
    gradients, weights = seconds["backward"] * (1 - bucket / times), seconds["passes"] * (1 - awaited)
    return min(gradients, OVERLAPPED * backward) + min(weights, OVERLAPPED * forward)


def _update(recipe: Recipe, parameters: Parameters, cluster: Cluster) -> float:
    """The seconds of the optimizer's update, limited by memory bandwidth.

    It reads and writes its state, reads gradients and writes weights.
    """
    if cluster.device.board.bandwidth is None or recipe.parallelism.offload != "none":
        return 0.0
    word = 4 if recipe.precision == "fp32" else 2
    bytes_each = 2 * (parameters.kept_bytes / sum(parameters.trained) + 4) + 4 + word
    share = optimizer_share(parameters.trained, recipe.parallelism.zero_stage, cluster.devices)
    return bytes_each * share / cluster.device.board.bandwidth
