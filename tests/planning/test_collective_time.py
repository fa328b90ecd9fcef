"""Times of collectives: closed forms, a ring whose parts are sent one by one, and trees built as NCCL builds them."""

from itertools import pairwise

import pytest

from vitscale.about.planning.cluster import Cluster, make_cluster
from vitscale.about.planning.communication import Kind
from vitscale.about.planning.step_time import collective_time
from vitscale.flops.hardware import find_device

H100, L4 = find_device("h100"), find_device("l4")
LARGE, SMALL = 1e12, 8.0  # bytes
US = 1e-6
ROUNDS: dict[Kind, int] = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
CLUSTERS = [(2, 2), (3, 1), (8, 8), (6, 3), (16, 4), (40, 8)]  # devices, of them a node


def cluster(devices: int, per_node: int, network: float = 50e9) -> Cluster:
    return make_cluster(H100, devices, devices_per_node=per_node, network=network)


@pytest.mark.parametrize("devices", [2, 8, 16])
@pytest.mark.parametrize("kind", ROUNDS)
def test_a_large_message_in_one_node_goes_by_a_ring_of_equal_hops(kind, devices):
    """Thakur et al. (2005): (p - 1) alpha + (p - 1) / p n beta, and twice that for an all-reduce."""
    time = collective_time(kind, LARGE, cluster(devices, devices))
    alpha, beta = 3.4 * US, 1 / 450e9
    expected = ROUNDS[kind] * (devices - 1) * (alpha + LARGE / devices * beta)
    assert time.algorithm == "ring" and time.total == pytest.approx(8.4 * US + expected)


@pytest.mark.parametrize("nodes", [2, 8, 128])
def test_a_small_sum_over_nodes_of_one_device_takes_twice_the_logarithm(nodes):
    time = collective_time("all-reduce", SMALL, cluster(nodes, 1))
    levels = {2: 1, 8: 3, 128: 7}[nodes]
    by_tree = 6.8 * US + 2 * (levels * 5.0 * US) + 2 * SMALL / (0.5 * 50e9)
    assert time.total == pytest.approx(min(by_tree, 6.6 * US + 2 * (nodes - 1) * (2.7 * US + SMALL / nodes / 25e9)))
    assert (time.algorithm == "tree") == (nodes > 2)


def finished(kind: Kind, size: float, devices: int, per_node: int, hop: float, crossing: float, rate: float) -> float:
    """When the last rank of a ring has its last part: each sends a part on when it has come and the one before is gone.

    A part takes `size / devices / rate` to leave, and then a hop's latency to arrive.
    """
    leaves = size / devices / rate
    ends_node = [(rank + 1) % per_node == 0 and devices > per_node for rank in range(devices)]
    latency = [crossing if ends else hop for ends in ends_node]
    here, free = [0.0] * devices, [0.0] * devices
    for _ in range(ROUNDS[kind] * (devices - 1)):
        free = [max(came, before) + leaves for came, before in zip(here, free, strict=True)]
        here = [free[rank - 1] + latency[rank - 1] for rank in range(devices)]
    return max(here)


@pytest.mark.parametrize(("devices", "per_node"), CLUSTERS)
@pytest.mark.parametrize("kind", ROUNDS)
def test_a_ring_over_nodes_takes_as_long_as_sending_part_by_part(kind, devices, per_node):
    time = collective_time(kind, LARGE, cluster(devices, per_node))
    rate = 50e9 if devices > per_node else 450e9
    assert time.total == pytest.approx(
        8.4 * US + finished(kind, LARGE, devices, per_node, 3.4 * US, 14 * US, rate), rel=1e-9
    )
    latency = finished(kind, 0, devices, per_node, 3.4 * US, 14 * US, rate)
    assert time.latency == pytest.approx(8.4 * US + latency, rel=1e-6)


def tree_of(nodes: int) -> list[int | None]:
    """The parent of each node in the first of NCCL's trees: by the lowest bit of its number that is set."""
    parents: list[int | None] = [None]
    for node in range(1, nodes):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        parents.append(up if up < nodes else node ^ bit)
    return parents


def levels(parents: list[int | None]) -> int:
    def depth(node: int) -> int:
        up = parents[node]
        return 0 if up is None else 1 + depth(up)

    return max(map(depth, range(len(parents))))


@pytest.mark.parametrize("nodes", [2, 3, 4, 6, 8, 13, 16, 100, 128, 1000])
def test_two_trees_are_as_deep_as_is_counted_and_no_node_sends_twice_the_message(nodes):
    first = tree_of(nodes)
    # The second: mirrored for even numbers of nodes, shifted by one for odd ones.
    other = (lambda node: nodes - 1 - node) if nodes % 2 == 0 else (lambda node: (node + 1) % nodes)
    parts = [0.0] * nodes
    for rename in (lambda node: node, other):
        for node, up in enumerate(first):
            if up is not None:
                parts[rename(node)] += 0.5  # its sum, of half of the message
                parts[rename(up)] += 0.5  # and the result, back to it
    assert max(parts) <= 2
    time = collective_time("all-reduce", SMALL, cluster(2 * nodes, 2, network=1e18))
    if time.algorithm == "tree":
        assert time.latency == pytest.approx(6.8 * US + 2 * (0.6 + levels(first) * 5.0) * US)
    assert nodes < 8 or time.algorithm == "tree"


@pytest.mark.parametrize("kind", ROUNDS)
def test_more_bytes_never_take_less_and_no_way_beats_the_link(kind):
    of = cluster(64, 8)
    times = [collective_time(kind, 2.0**power, of) for power in range(3, 36)]
    assert all(less.total < more.total for less, more in pairwise(times))
    for power, time in zip(range(3, 36), times, strict=True):
        assert time.total > ROUNDS[kind] * 63 / 64 * 2.0**power / 50e9
    assert {time.protocol for time in times} == {"LL", "LL128", "Simple"}


def test_without_nvlink_a_protocol_of_its_own_is_not_used_and_hops_take_longer():
    slots = make_cluster(L4, 8)
    assert not slots.has_nvlink and cluster(8, 8).has_nvlink
    found = {collective_time("all-gather", 2.0**power, slots).protocol for power in range(3, 36)}
    assert found == {"LL", "Simple"}
    assert collective_time("all-gather", SMALL, slots).latency == pytest.approx((6.6 + 7 * 1.0) * US)
