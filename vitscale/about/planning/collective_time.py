"""How long a collective takes, around a ring or up and down a tree: the latency of its hops, and its bytes.

A message costs a fixed start, a latency for each hop on its longest path, and its bytes at the rate of the slowest
link. This is the model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), with different latencies for hops within a node and between nodes, as in NCCL's own model
(src/graph/tuning.cc). The latencies and the choice of the fastest algorithm are NCCL's, too: an all-reduce uses a ring
or a tree, everything else a ring. Reductions inside switches (SHARP, NVLS) are not modelled.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.about.planning.cluster import Cluster
from vitscale.about.planning.communication import Kind

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
_US = 1e-6


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
        sent = _passes(kind) * (cluster.devices - 1) / cluster.devices * message_bytes
    inside = way.nvlink if cluster.has_nvlink else way.pcie
    start = way.start if cluster.devices > 1 else 0.0  # alone, nothing is started
    latency = start + (hops - crossing) * inside + crossing * way.network
    return CollectiveTime(way.algorithm, way.protocol, _US * latency, sent / (cluster.ring_rate * way.payload))


def _passes(kind: Kind) -> int:
    """How many times the parts of a message travel around a ring: for an all-reduce first as sums, then as results."""
    return 2 if kind == "all-reduce" else 1


def _ring_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """(hops of the part of a message that arrives last, those of them that lead to another node).

    A part stops one hop before it would be back where it started, and for some part that missing hop is within a node,
    so this part crosses between nodes as often as there are nodes.
    """
    hops = _passes(kind) * (cluster.devices - 1)
    return hops, min(hops, _passes(kind) * cluster.nodes) if cluster.nodes > 1 else 0


def _tree_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """(hops up and down a tree, those of them that lead to another node): chains within nodes, a binary tree of nodes.

    NCCL uses two such trees, each for half of the message; the inner nodes of one are leaves of the other, so that no
    node sends more than any other (Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", 2009).
    """
    depth = (cluster.nodes - 1).bit_length()
    return 2 * (cluster.devices_per_node - 1 + depth), 2 * depth
