"""How long a step should take: computing, updating, and the network time that computing does not hide.

This is only a model. It has no slow ranks and no late data, and kernels are equally efficient whatever the micro-batch.
Real steps take longer.

A message costs a fixed start, a latency for each hop on its longest path, and its bytes at the rate of the slowest
link. This is the model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), with different latencies for hops within a node and between nodes, as in NCCL's own model
(src/graph/tuning.cc). The latencies and the choice of the fastest algorithm are NCCL's, too: an all-reduce uses a ring
or a tree, everything else a ring. Reductions inside switches (SHARP, NVLS) are not modelled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from vitscale.about.planning.cluster import Cluster
from vitscale.about.planning.communication import PASSES, Collective, Kind, Phase
from vitscale.flops.accounting import FLOPS_PER_MAC, training_flops_per_image
from vitscale.flops.work import Work
from vitscale.recipe import Recipe
from vitscale.training.beginning.memory import optimizer_share
from vitscale.training.beginning.tensors import Parameters
from vitscale.training.deepspeed.config import elements_in_flight

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
_US = 1e-6

HIDDEN = 0.5
"""The share of the time in which messages could be sent during computing that is really used for it."""

OVERLAPPED = 0.8
"""The same with `parallelism.overlap`: of the backward pass for gradients and of the forward pass for weights. The last
bucket of gradients and the first of weights, or of a compiled block's weights, do not count, because nothing is
computed while they are sent.
benchmarks/network.py measured it with compute and network on separate devices.
"""

_BACKWARD = 2 / 3  # of the model's FLOPs


class _Way(NamedTuple):
    """One of NCCL's combinations of algorithm and protocol, with the latencies of a hop in microseconds."""

    algorithm: Algorithm
    protocol: Protocol
    payload: float  # the share of a link's bytes that are the message's; the rest are flags
    start: float  # the fixed cost of a collective, in microseconds, whatever the number of ranks
    nvlink: float
    pcie: float
    network: float


# Latencies as in NCCL 2.18 to 2.28, src/graph/tuning.cc (baseLat, hwLat).
_WAYS = (
    _Way("ring", "Simple", 1, 8.4, 3.4, 5.7, 14.0),
    _Way("ring", "LL128", 120 / 128, 14.0, 1.9, 2.5, 4.0),
    _Way("ring", "LL", 4 / 8, 6.6, 0.6, 1.0, 2.7),
    _Way("tree", "Simple", 1, 8.4, 4.0, 4.0, 14.0),
    _Way("tree", "LL128", 120 / 128, 14.0, 1.25, 1.9, 8.5),
    _Way("tree", "LL", 4 / 8, 6.8, 0.6, 1.0, 5.0),
)


@dataclass(frozen=True)
class CollectiveTime:
    """The time of one message of a collective, in seconds."""

    algorithm: Algorithm
    protocol: Protocol
    latency: float  # what even an empty message takes
    transfer: float  # for its bytes

    @property
    def total(self) -> float:
        return self.latency + self.transfer


def collective_time(kind: Kind, message_bytes: float, cluster: Cluster) -> CollectiveTime:
    """The time of a message of `message_bytes` over all ranks of a cluster, by NCCL's fastest way."""
    ways = [way for way in _WAYS if way.algorithm == "ring" or kind == "all-reduce"]
    if not cluster.has_nvlink:
        ways = [way for way in ways if way.protocol != "LL128"]  # it relies on NVLink's order of writes
    return min((_by(way, kind, message_bytes, cluster) for way in ways), key=lambda time: time.total)


def _by(way: _Way, kind: Kind, message_bytes: float, cluster: Cluster) -> CollectiveTime:
    hops, crossing = (_ring_hops if way.algorithm == "ring" else _tree_hops)(kind, cluster)
    sent = 2 * message_bytes  # by each node, over both trees together
    if way.algorithm == "ring":
        sent = PASSES[kind] * (cluster.devices - 1) / cluster.devices * message_bytes
    inside = way.nvlink if cluster.has_nvlink else way.pcie
    start = way.start if cluster.devices > 1 else 0.0  # alone, nothing is started
    latency = start + (hops - crossing) * inside + crossing * way.network
    return CollectiveTime(way.algorithm, way.protocol, _US * latency, sent / (cluster.ring_rate * way.payload))


def _ring_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """(hops of the part of a message that arrives last, those of them that lead to another node).

    A part stops one hop before it would be back where it started, and for some part that missing hop is within a node,
    so this part crosses between nodes as often as there are nodes.
    """
    hops = PASSES[kind] * (cluster.devices - 1)
    return hops, min(hops, PASSES[kind] * cluster.nodes) if cluster.nodes > 1 else 0


def _tree_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """(hops up and down a tree, those of them that lead to another node): chains within nodes, a binary tree of nodes.

    NCCL uses two such trees, each for half of the message; the inner nodes of one are leaves of the other, so that no
    node sends more than any other (Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", 2009).
    """
    depth = (cluster.nodes - 1).bit_length()
    return 2 * (cluster.devices_per_node - 1 + depth), 2 * depth


# ---- Steps -----------------------------------------------------------------------------------------------------------


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
    hidden = _hidden(recipe, parameters, cluster.devices, seconds, compute, recompute)
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


def _hidden(
    recipe: Recipe,
    parameters: Parameters,
    world_size: int,
    seconds: Mapping[Phase, float],
    compute: float,
    recompute: float,
) -> float:
    """The seconds of message time that computing hides."""
    stage, (_, accumulation) = recipe.parallelism.zero_stage, recipe.split(world_size)
    backward = _BACKWARD * compute + recompute
    if not recipe.parallelism.exchanges:
        if not overlaps(recipe):
            return 0.0
        # Below stage 3 gradients alone, and in stage 1 only those of the last micro-batch.
        busy = compute + recompute if stage == 3 else backward
        return min(seconds["passes"] + seconds["backward"], HIDDEN * busy / (accumulation if stage == 1 else 1))
    # Buckets are sent as soon as they are full.
    total = sum(parameters.trained)
    bucket = min(1.0, elements_in_flight(recipe)["reduce_bucket_size"] / total)
    block = sum(sum(layer.trained) for layer in parameters.layers if layer.block == 0) / total
    # A compiled block waits for all its weights.
    awaited = max(bucket, block) if recipe.parallelism.compiles else bucket
    times = accumulation if stage == 2 else 1
    backward = backward / accumulation * times  # stage 1 sends only in the last one
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
