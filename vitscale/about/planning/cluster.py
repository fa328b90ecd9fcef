"""The cluster that a plan is made for: its devices and how they are connected."""

import math
from dataclasses import dataclass

from vitscale.flops.hardware import Device
from vitscale.ground.errors import RecipeError

GB = 1e9
DEVICES_PER_NODE = 8
NETWORK = 50 * GB
LINK = 25 * GB
EFFICIENCY = 0.4
_FASTEST_SLOT = 128 * GB  # PCIe 6


@dataclass(frozen=True)
class Cluster:
    """A cluster of nodes with equal devices."""

    device: Device
    devices: int  # of all nodes
    devices_per_node: int
    memory: float  # bytes of one device
    network: float  # bytes/s that a node can send to other nodes
    link: float  # bytes/s that a device can send to others in its node
    efficiency: float  # the share of their peak FLOP/s that devices reach while they compute without waiting
    assumptions: tuple[str, ...] = ()  # what was assumed because it was not given, in words
    storage: float | None = None  # bytes/s at which all nodes together write checkpoints
    price: float | None = None  # of one device for one hour

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node

    @property
    def peak(self) -> float:
        """One device's peak FLOP/s in bf16."""
        return self.device.peak["bf16"]

    @property
    def has_nvlink(self) -> bool:
        """Whether a node's devices are connected by NVLink, judged by a link that is faster than any PCIe slot."""
        return self.link > _FASTEST_SLOT

    @property
    def ring_rate(self) -> float:
        """The rate at which each rank of a ring can send, in bytes/s.

        A ring enters and leaves each node once, so the network carries what one rank sends, not what all of the node's
        ranks send. Several rings, as many as there are adapters, share a node's network.
        """
        if self.devices == 1:
            return math.inf
        return self.link if self.nodes == 1 else min(self.link, self.network)


def make_cluster(
    device: Device,
    devices: int,
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    network: float | None = None,
    memory: float | None = None,
    efficiency: float | None = None,
    storage: float | None = None,
    price: float | None = None,
) -> Cluster:
    """A cluster from what is known about it; the rest is assumed and listed. Rates in bytes/s, memory in bytes.

    Raises `RecipeError` for a device without bf16, for unknown memory, and for devices that do not fill equal nodes.
    """
    if "bf16" not in device.peak:
        raise RecipeError(f"--hardware {device.name}: it has no matrix units for bf16, in which runs are planned")
    if memory is None and device.board.memory is None:
        raise RecipeError(f"--hardware {device.name}: is sold with several sizes of memory; give --memory GB")
    assumed = []
    if nodes is not None and devices % nodes:
        raise RecipeError(f"--devices {devices} does not divide by --nodes {nodes}")
    if devices_per_node is None:
        devices_per_node = devices // nodes if nodes is not None else min(DEVICES_PER_NODE, devices)
        if nodes is None and devices > 1:
            assumed.append(f"{devices_per_node} devices a node (--nodes, --devices-per-node)")
    if devices % devices_per_node:
        raise RecipeError(
            f"--devices {devices} does not divide by {devices_per_node} devices a node: give --nodes or "
            f"--devices-per-node"
        )
    if nodes is not None and nodes * devices_per_node != devices:
        raise RecipeError(f"--nodes {nodes} x --devices-per-node {devices_per_node} is not --devices {devices}")
    if network is None:
        network, source = NETWORK, "one adapter of 400 Gbit/s"
        if (per_device := device.board.network) is not None:
            network = per_device * devices_per_node
            source = f"{per_device / GB:g} for each device as in its maker's nodes"
        if devices > devices_per_node:
            assumed.append(f"{network / GB:g} GB/s of network a node, {source} (--network)")
    link = device.board.link or LINK
    if devices_per_node > 1:
        source = "datasheet" if device.board.link else "that of the device is not known"
        assumed.append(f"{link / GB:g} GB/s from each device to the others of its node ({source})")
    if efficiency is None:
        assumed.append(f"{EFFICIENCY:.0%} of the peak while devices compute, with any micro-batch (--mfu)")
    memory, efficiency = memory or device.board.memory or 0.0, efficiency or EFFICIENCY
    known = device, devices, devices_per_node, memory, network, link, efficiency
    return Cluster(*known, tuple(assumed), storage, price)
