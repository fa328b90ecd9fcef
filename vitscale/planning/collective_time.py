"""How long a collective takes, around a ring or up and down a tree: latencies of its hops, and its bytes.

A message costs a start, a latency for each hop on its longest way, and its bytes at the rate of the slowest link: the
model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), with one
latency for hops within a node and another between nodes, as NCCL's own (src/graph/tuning.cc). Latencies and the choice
of the fastest are NCCL's too: an all-reduce goes by ring or tree, all else by ring. What it does with switches that
add (SHARP, NVLS) is not counted.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.planning.cluster import Cluster
from vitscale.planning.communication import Kind

Algorithm = Literal["ring", "tree"]
Protocol = Literal["LL", "LL128", "Simple"]
_US = 1e-6


class _Way(NamedTuple):
    """An algorithm and a protocol of NCCL's.

    Attributes:
        payload: share of the bytes on a link that are the message's; the others are flags.
        start: microseconds of any collective, however few ranks it has.
        nvlink, pcie, network: microseconds of a hop.
    """

    algorithm: Algorithm
    protocol: Protocol
    payload: float
    start: float
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
    """One message of a collective.

    Attributes:
        algorithm, protocol: by which it goes.
        latency: seconds that it takes however small it is.
        transfer: seconds for its bytes.
    """

    algorithm: Algorithm
    protocol: Protocol
    latency: float
    transfer: float

    @property
    def total(self) -> float:
        """Seconds."""
        return self.latency + self.transfer


def collective_time(kind: Kind, message_bytes: float, cluster: Cluster) -> CollectiveTime:
    """The fastest way for a message of so many bytes, all ranks of a cluster together."""
    ways = (_by(way, kind, message_bytes, cluster) for way in _WAYS if _is_open(way, kind, cluster))
    return min(ways, key=lambda time: time.total)


def _is_open(way: _Way, kind: Kind, cluster: Cluster) -> bool:
    if way.algorithm == "tree" and kind != "all-reduce":
        return False
    return way.protocol != "LL128" or cluster.has_nvlink  # it relies on NVLink's order of writes


def _by(way: _Way, kind: Kind, message_bytes: float, cluster: Cluster) -> CollectiveTime:
    hops, crossing = (_ring_hops if way.algorithm == "ring" else _tree_hops)(kind, cluster)
    sent = 2 * message_bytes  # by each node, over both trees
    if way.algorithm == "ring":
        sent = _passes(kind) * (cluster.devices - 1) / cluster.devices * message_bytes
    inside = way.nvlink if cluster.has_nvlink else way.pcie
    start = way.start if cluster.devices > 1 else 0.0  # alone, nothing is started
    latency = start + (hops - crossing) * inside + crossing * way.network
    return CollectiveTime(way.algorithm, way.protocol, _US * latency, sent / (cluster.ring_rate * way.payload))


def _passes(kind: Kind) -> int:
    """How often the parts of a message go round a ring: sums first, then results."""
    return 2 if kind == "all-reduce" else 1


def _ring_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """Hops of the part that comes last, and how many of them lead to another node.

    One round ends a hop before it is closed, and there is a part for which that is a hop within a node.
    """
    hops = _passes(kind) * (cluster.devices - 1)
    return hops, min(hops, _passes(kind) * cluster.nodes) if cluster.nodes > 1 else 0


def _tree_hops(kind: Kind, cluster: Cluster) -> tuple[int, int]:
    """Up and down: a chain in each node, and a binary tree of the nodes.

    NCCL has two such trees, each for half of the message; inner nodes of one are leaves of the other, so that no node
    sends more than any other (Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", 2009).
    """
    depth = (cluster.nodes - 1).bit_length()
    return 2 * (cluster.devices_per_node - 1 + depth), 2 * depth
