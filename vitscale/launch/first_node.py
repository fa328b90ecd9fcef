"""Node 0 of a launch over several nodes: the other nodes connect to it, and it decides for all."""

import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from vitscale.errors import PeerLostError
from vitscale.launch.connections import (
    LOOK_EVERY_SECONDS,
    SILENCE_SECONDS,
    Connection,
    allow_connections,
    listen,
    resolve,
    say_farewell,
)
from vitscale.launch.ends import End
from vitscale.launch.nodes import Account, Decision, Layout, NodeEndedError, ThisNode, another_port, fitting
from vitscale.launch.supervisor import Supervisor, say


class FirstNode:
    """Node 0, to which the other nodes connect.

    Args:
        place: this node, and where it listens.
        global_batch: the global batch, which the number of ranks has to divide; None for any number of ranks.
        supervisor: this launch's supervisor, which knows whether the launch was told to end.
        silence_s: a node that has not been heard from for so many seconds counts as lost.

    Raises `PeerLostError` if the place's name stays unknown, `RecipeError` if its port cannot be listened at.
    """

    def __init__(
        self, place: ThisNode, global_batch: int | None, supervisor: Supervisor, *, silence_s: float = SILENCE_SECONDS
    ) -> None:
        self._place, self._global_batch, self._supervisor, self._silence = place, global_batch, supervisor, silence_s
        allow_connections(place.nodes)
        self._listener = listen(place, resolve(place, supervisor))
        self._strangers: list[Connection] = []
        self._others: dict[int, _Other] = {}
        self._trouble = ""
        self._port: socket.socket | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Wait for the other nodes, then send each its ranks."""
        began, told_at = time.monotonic(), 0.0
        missing = self._missing()
        while missing:
            if self._supervisor.told:
                return None
            waited = time.monotonic() - began
            if waited > self._place.wait_s:
                raise PeerLostError(
                    f"{_nodes(missing)} of {self._place.nodes} did not connect to {self._place.address}:"
                    f"{self._place.port} within {self._place.wait_s:,.0f} s. Does the launch run there, with this "
                    f"--master and --nodes? Can that machine resolve the name and reach the port?"
                )
            if waited > 2 and (told_at == 0 or waited - told_at > 60):
                say(f"waits for {_nodes(missing)} of {self._place.nodes} at {self._place.address}:{self._place.port}")
                told_at = waited
            time.sleep(LOOK_EVERY_SECONDS)
            self._poll()
            for other in self._others.values():
                if other.left is not None:
                    raise NodeEndedError(f"{other.name} ended: {other.left.why}", other.left.code)
            missing = self._missing()
        others = [self._others[node] for node in range(1, self._place.nodes)]
        counts = [devices, *(other.devices for other in others)]
        asked_for = is_asked_for or any(other.is_asked_for for other in others)
        ranks = counts if asked_for else fitting(counts, self._global_batch)
        self._port = another_port(self._port)
        layouts = [
            Layout(own, sum(ranks[:node]), sum(ranks), self._place.address, self._port.getsockname()[1])
            for node, own in enumerate(ranks)
        ]
        self._trouble = ""
        for other, layout in zip(others, layouts[1:], strict=True):
            other.begin(layout)
        return layouts[0]

    def exchange(self, trouble: str) -> str:
        """Return a failure of another node, or "", and forward the first failure to all nodes."""
        self._poll()
        elsewhere = next((words for other in self._others.values() if (words := other.trouble())), "")
        first = trouble or elsewhere
        if first and not self._trouble:
            self._trouble = first
            for other in self._others.values():
                if other.trouble() != first:
                    other.connection.send({"trouble": first})
        return elsewhere

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Wait until every other node has sent its account or is lost, then decide for all."""
        trouble = account.culprit.describe() if account.culprit else ""
        while True:
            self.exchange(trouble)
            others = [other.conclusion() for other in self._others.values()]
            known = [other for other in others if other is not None]
            if len(known) == len(others) or self._supervisor.at_once:
                break
            time.sleep(LOOK_EVERY_SECONDS)
        decision = decide([account, *known])
        self._tell_all(decision)
        return decision

    def leave(self, code: int, why: str) -> None:
        """End the launches of all nodes."""
        self._tell_all(Decision(code, why, restarts=False))
        self._listener.close()

    def _tell_all(self, decision: Decision) -> None:
        for other in self._others.values():
            other.decided(decision)
        if not decision.restarts:
            say_farewell([other.connection for other in self._others.values()])

    def _missing(self) -> list[int]:
        return [
            node for node in range(1, self._place.nodes) if node not in self._others or not self._others[node].is_ready
        ]

    def _poll(self) -> None:
        try:
            while True:
                self._strangers.append(Connection(self._listener.accept()[0], self._silence))
        except OSError as error:
            # Where files have run out, a new connection waits until one that never said hello is dropped as silent.
            if error.errno not in (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                raise
        for stranger in list(self._strangers):
            messages = stranger.receive()
            if messages:
                self._welcome(stranger, *messages)
            if messages or stranger.lost:
                self._strangers.remove(stranger)
        for other in self._others.values():
            for message in other.connection.receive():
                other.take(message)

    def _welcome(self, stranger: Connection, hello: Mapping[str, Any], *messages: Mapping[str, Any]) -> None:
        """Register a node by its hello message, or refuse it; then handle the messages that came with it."""
        try:
            node, nodes, host = int(hello["node"]), int(hello["nodes"]), str(hello["host"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return stranger.close()
        refusal = ""
        if nodes != self._place.nodes or not 0 < node < nodes:
            refusal = f"this is node {node} of {nodes}, but node 0 was started as one of {self._place.nodes}"
        elif node in self._others and not self._others[node].connection.lost:
            refusal = (
                f"node {node} is already connected, from {self._others[node].host}; every node needs "
                f"its own --node-rank"
            )
        if refusal:
            stranger.send({"refused": refusal})
            return say_farewell([stranger])
        self._others[node] = _Other(f"node {node} ({host})", host, stranger, is_new=node in self._others)
        for message in messages:
            self._others[node].take(message)
        say(f"node {node} of {nodes} is there: {host}")


class _Other:
    """What node 0 knows about one of the other nodes."""

    def __init__(self, name: str, host: str, connection: Connection, *, is_new: bool) -> None:
        self.name, self.host, self.connection = name, host, connection
        self.devices, self.is_asked_for, self.is_ready = 0, False, False
        self.left: Decision | None = None
        # A node that reconnects has no ranks in the current attempt.
        self._trouble = f"{name} lost its ranks and reconnected" if is_new else ""
        self._account: Account | None = None

    def begin(self, layout: Layout) -> None:
        self.is_ready, self._trouble, self._account = False, "", None
        self.connection.send({"start": layout})

    def decided(self, decision: Decision) -> None:
        self.connection.send({"decision": decision})

    def take(self, message: Mapping[str, Any]) -> None:
        """Handle a message; a malformed one closes the connection, because no launch sends such a message."""
        try:
            if "ready" in message:
                devices, is_asked_for = message["ready"]
                self.devices, self.is_asked_for, self.is_ready = int(devices), bool(is_asked_for), True
            elif "trouble" in message:
                self._trouble = f"{self.name}: {message['trouble']}"
            elif "account" in message:
                culprit, *others = (message["account"][field.name] for field in fields(Account))
                self._account = Account(None if culprit is None else End(**culprit), *others)
            elif "leaves" in message:
                self.left = Decision(*message["leaves"])
                self._trouble = f"{self.name} ended: {self.left.why}"
        except (KeyError, TypeError, ValueError, OverflowError):
            self.connection.close()

    def trouble(self) -> str:
        lost = self.connection.lost and self._account is None
        return self._trouble or (f"{self.name} {self.connection.lost}" if lost else "")

    def conclusion(self) -> Account | None:
        if self._account is None and (self.connection.lost or self.is_ready or self.left):
            return Account(lost=self.trouble())
        return self._account


def _nodes(numbers: Sequence[int]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
