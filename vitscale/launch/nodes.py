"""What several nodes, each with a launch of its own, agree on: the ranks of each before an attempt, and what follows.

The launch of node 0 listens at one port that all know; the others come to it, and come again when they lost it. Nothing
here waits for the network: `exchange` is called many times a second.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vitscale.errors import VitscaleError
from vitscale.launch.ends import End
from vitscale.machine import hold_port

DEFAULT_PORT = 29600
"""At which the launches of several nodes meet, on the first one."""


@dataclass(frozen=True)
class Place:
    """This node among the nodes of a launch.

    Attributes:
        node: its number, from 0.
        address, port: where the nodes meet, on node 0.
        wait_s: how long to wait for nodes that are not there.
    """

    node: int
    nodes: int
    address: str
    port: int = DEFAULT_PORT
    wait_s: float = 600.0


class Layout(NamedTuple):
    """One attempt: so many ranks on this node, from `first_rank` on, of `world_size`; they meet at address:port."""

    ranks: int
    first_rank: int
    world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class Account:
    """What became of an attempt on one node.

    Attributes:
        culprit: the rank that is the cause of this node's bad ends.
        is_done: the run is.
        all_ended_well: with exit code 0.
        told: the signal that this node's launch got, or nothing.
        unkillable: a rank is still there.
        lost: why this node cannot tell what became of it, or nothing.
    """

    culprit: End | None = None
    is_done: bool = False
    all_ended_well: bool = False
    told: str = ""
    unkillable: bool = False
    lost: str = ""


class Decision(NamedTuple):
    """What all nodes do now: restart after a pause, the n-th time in a row without progress, or end with the code."""

    code: int
    why: str
    restarts: bool
    in_a_row: int = 0
    pause_s: float = 0.0


class NodeEndedError(VitscaleError):
    """The launch of another node has ended, and ours with it and with its code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class Nodes(Protocol):
    """The nodes of a launch, as one of them sees them."""

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Wait for all nodes, then share the ranks out: one a device, or as many as were asked for.

        None where this launch is told to end meanwhile. Raises `PeerLostError` where some do not come, `RecipeError`
        where they do not fit together, `NodeEndedError` where one has ended instead.
        """

    def exchange(self, trouble: str) -> str:
        """Tell the others what went wrong here, if anything, and return what went wrong elsewhere, if anything."""

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """What follows from all nodes' accounts: node 0 decides, or this one where that is lost."""

    def leave(self, code: int, why: str) -> None:
        """This launch ends with the code; the others need not wait for it."""


def fitting(devices: Sequence[int], global_batch: int | None) -> list[int]:
    """Ranks of each node: the most, of no node more than it has devices, that together divide the global batch.

    As many as there are devices where the batch may be anything, or where nothing fits.
    """
    if global_batch is not None:
        for most in range(max(devices), 0, -1):
            ranks = [min(count, most) for count in devices]
            if global_batch % sum(ranks) == 0:
                return ranks
    return list(devices)


class OneNode:
    """There are no others."""

    def __init__(self, global_batch: int | None) -> None:
        self._global_batch = global_batch
        self._port: socket.socket | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """At once, at a port of this machine that is free."""
        [ranks] = [devices] if is_asked_for else fitting([devices], self._global_batch)
        self._port = another_port(self._port)
        return Layout(ranks, 0, ranks, "127.0.0.1", self._port.getsockname()[1])

    def exchange(self, trouble: str) -> str:
        """Nothing goes wrong elsewhere."""
        del trouble
        return ""

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Its own account alone counts."""
        return decide([account])

    def leave(self, code: int, why: str) -> None:
        """Nobody has to know."""


def another_port(before: socket.socket | None) -> socket.socket:
    """A new one for every attempt: ranks that are left of the last one cannot be met there."""
    if before is not None:
        before.close()
    return hold_port()
