"""How the launches of several nodes agree: on each node's ranks before an attempt, and on what to do after it.

Each node has a launch of its own. The launch of node 0 listens at a port that all know; the others connect to it, and
reconnect if they lose it. During an attempt nothing here blocks on the network: `exchange` is called many times a
second.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from vitscale.ground.machine import hold_port
from vitscale.launch.ends import Code, Count, End, Words

DEFAULT_PORT = 29600  # the port on node 0 where the launches of several nodes meet

_Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s\p{C}]+$")]
_Ranks = Annotated[int, Field(ge=1, le=1024)]  # of a node, as --ranks has it


@dataclass(frozen=True)
class ThisNode:
    """This node among the `nodes` of a launch, counted from 0, and the address and port where node 0 listens."""

    node: int
    nodes: int
    address: str
    port: int = DEFAULT_PORT
    wait_s: float = 600.0  # how long to wait for missing nodes


class Layout(NamedTuple):
    """The ranks of one attempt: `ranks` of `world_size` run here, from `first_rank`; all meet at address:port."""

    ranks: _Ranks
    first_rank: Count
    world_size: Annotated[int, Field(ge=1, le=65536 * 1024)]
    address: _Host
    port: Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True)
class Account:
    """How an attempt ended on one node."""

    culprit: End | None = None  # the exit that caused this node's other failures; None if no rank failed
    is_done: bool = False  # whether the run is finished
    all_ended_well: bool = False  # whether every rank exited with code 0
    told: Words = ""  # the signal that this node's launch received
    unkillable: bool = False  # whether a rank is still alive after it was killed
    lost: Words = ""  # why this node's outcome is unknown


class Decision(NamedTuple):
    """What all nodes do next: restart after a pause, or end with exit code `code`."""

    code: Code
    why: Words
    restarts: bool
    in_a_row: Count = 0  # restarts without progress
    pause_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 0.0


class Hello(NamedTuple):
    """A node's first message: its number among how many, its host, and what tells its launch from every other."""

    node: Annotated[int, Field(ge=1, lt=65536)]
    nodes: Annotated[int, Field(ge=2, le=65536)]
    host: _Host
    launch: _Host


class ToFirst(BaseModel, extra="forbid", strict=True):
    """A message to node 0: one of these, or nothing as a sign of life."""

    hello: Hello | None = None
    ready: tuple[_Ranks, bool] | None = None  # its devices, and whether so many ranks were asked for
    trouble: Words | None = None
    account: Account | None = None
    leaves: Decision | None = None


class FromFirst(BaseModel, extra="forbid", strict=True):
    """A message from node 0, likewise."""

    trouble: Words | None = None
    start: Layout | None = None
    decision: Decision | None = None
    refused: Words | None = None


def fitting(devices: Sequence[int], global_batch: int | None) -> list[int]:
    """The number of ranks of each node: at most one per device, and in total a divisor of the global batch.

    Every node gets min(its devices, the largest limit for which the total divides the batch). If `global_batch` is
    None, or no limit works, every device gets a rank.
    """
    if global_batch is not None:
        for most in range(max(devices), 0, -1):
            ranks = [min(count, most) for count in devices]
            if global_batch % sum(ranks) == 0:
                return ranks
    return list(devices)


class OneNode:
    """A launch on a single node. `FirstNode` and `OtherNode` have the same methods for one of several."""

    def __init__(self, global_batch: int | None) -> None:
        self._global_batch = global_batch
        self._port: socket.socket | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Wait for all nodes, then assign the ranks: one per device, or as many as were asked for.

        Returns None if this launch is told to end while it waits. Raises `PeerLostError` if a node does not come in
        time, `RecipeError` if the nodes do not fit together, `VitscaleError` with its code if one has ended.
        """
        [ranks] = [devices] if is_asked_for else fitting([devices], self._global_batch)
        self._port = another_port(self._port)
        return Layout(ranks, 0, ranks, "127.0.0.1", self._port.getsockname()[1])

    def exchange(self, trouble: str) -> str:
        """Tell the other nodes what went wrong here ("" for nothing); return what went wrong elsewhere, or ""."""
        del trouble
        return ""

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Decide what to do next from the accounts of all nodes: node 0 decides, or this node if node 0 is lost."""
        return decide([account])

    def leave(self, code: int, why: str) -> None:
        """Tell the others that this launch ends with exit code `code`, so that they do not wait for it."""


def another_port(before: socket.socket | None) -> socket.socket:
    """A new port for each attempt, so that ranks left over from the last attempt cannot join this one."""
    if before is not None:
        before.close()
    return hold_port()
