"""One launch on each of several nodes: they meet before every attempt, tell each other what fails, and end as one.

The launch of node 0 listens at one port that all know; the others come to it, and come again when they lost it. What
goes over a connection is lines of JSON. Nothing here waits for the network: `exchange` is called many times a second.
"""

import contextlib
import errno
import json
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

from vitscale.errors import PeerLostError, RecipeError, VitscaleError
from vitscale.launch.ends import End
from vitscale.launch.supervisor import Supervisor, say
from vitscale.machine import hold_port

DEFAULT_PORT = 29600
"""At which the launches of several nodes meet, on the first one."""

_LOOK_EVERY_SECONDS = 0.05
_SILENCE_SECONDS = 30.0
_BEATS = 10  # in that time
_CONNECT_SECONDS = 3.0
_RECONNECT_SECONDS = 0.5
_FAREWELL_SECONDS = 5.0
_MOST_BYTES = 1 << 20
_OTHER_FILES = 256  # those of the ranks' output, and of strangers


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
        self._port = _another_port(self._port)
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


class FirstNode:
    """Node 0, to which the others come.

    Args:
        supervisor: of this launch; it knows whether that was told to end.
        silence_s: after which a node that does not say anything is lost.

    Raises `PeerLostError` where the place's name stays unknown, `RecipeError` where nobody can listen there.
    """

    def __init__(
        self, place: Place, global_batch: int | None, supervisor: Supervisor, *, silence_s: float = _SILENCE_SECONDS
    ) -> None:
        self._place, self._global_batch, self._supervisor, self._silence = place, global_batch, supervisor, silence_s
        _allow_connections(place.nodes)
        self._listener = _listen(place, _resolve(place, supervisor))
        self._strangers: list[_Connection] = []
        self._others: dict[int, _Other] = {}
        self._trouble = ""
        self._port: socket.socket | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Wait for the others and tell each its ranks."""
        began, told_at = time.monotonic(), 0.0
        missing = self._missing()
        while missing:
            if self._supervisor.told:
                return None
            waited = time.monotonic() - began
            if waited > self._place.wait_s:
                raise PeerLostError(
                    f"{_nodes(missing)} of {self._place.nodes} did not come to {self._place.address}:"
                    f"{self._place.port} within {self._place.wait_s:,.0f} s. Does the launch run there, with this "
                    f"--master and --nodes? Can that machine resolve the name and reach the port?"
                )
            if waited > 2 and (told_at == 0 or waited - told_at > 60):
                say(f"waits for {_nodes(missing)} of {self._place.nodes} at {self._place.address}:{self._place.port}")
                told_at = waited
            time.sleep(_LOOK_EVERY_SECONDS)
            self._poll()
            for other in self._others.values():
                if other.left is not None:
                    raise NodeEndedError(f"{other.name} ended: {other.left.why}", other.left.code)
            missing = self._missing()
        others = [self._others[node] for node in range(1, self._place.nodes)]
        counts = [devices, *(other.devices for other in others)]
        asked_for = is_asked_for or any(other.is_asked_for for other in others)
        ranks = counts if asked_for else fitting(counts, self._global_batch)
        self._port = _another_port(self._port)
        layouts = [
            Layout(own, sum(ranks[:node]), sum(ranks), self._place.address, self._port.getsockname()[1])
            for node, own in enumerate(ranks)
        ]
        self._trouble = ""
        for other, layout in zip(others, layouts[1:], strict=True):
            other.begin(layout)
        return layouts[0]

    def exchange(self, trouble: str) -> str:
        """Forward what the nodes have to say of failures."""
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
        """Wait for every other node's account, or for its loss, and decide for all."""
        trouble = account.culprit.describe() if account.culprit else ""
        while True:
            self.exchange(trouble)
            others = [other.conclusion() for other in self._others.values()]
            known = [other for other in others if other is not None]
            if len(known) == len(others) or self._supervisor.at_once:
                break
            time.sleep(_LOOK_EVERY_SECONDS)
        decision = decide([account, *known])
        self._tell_all(decision)
        return decision

    def leave(self, code: int, why: str) -> None:
        """All end."""
        self._tell_all(Decision(code, why, restarts=False))
        self._listener.close()

    def _tell_all(self, decision: Decision) -> None:
        for other in self._others.values():
            other.decided(decision)
        if not decision.restarts:
            _say_farewell([other.connection for other in self._others.values()])

    def _missing(self) -> list[int]:
        return [
            node for node in range(1, self._place.nodes) if node not in self._others or not self._others[node].is_ready
        ]

    def _poll(self) -> None:
        try:
            while True:
                self._strangers.append(_Connection(self._listener.accept()[0], self._silence))
        except OSError as error:
            # Whoever finds no room waits until a stranger that says nothing is lost.
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

    def _welcome(self, stranger: "_Connection", hello: Mapping[str, Any], *messages: Mapping[str, Any]) -> None:
        """A launch has said which node it is, and perhaps more."""
        try:
            node, nodes, host = int(hello["node"]), int(hello["nodes"]), str(hello["host"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return stranger.close()
        refusal = ""
        if nodes != self._place.nodes or not 0 < node < nodes:
            refusal = f"this is node {node} of {nodes}, and node 0 was started as one of {self._place.nodes}"
        elif node in self._others and not self._others[node].connection.lost:
            refusal = (
                f"node {node} is there already, on {self._others[node].host}; every node needs its own --node-rank"
            )
        if refusal:
            stranger.send({"refused": refusal})
            return _say_farewell([stranger])
        self._others[node] = _Other(f"node {node} ({host})", host, stranger, is_new=node in self._others)
        for message in messages:
            self._others[node].take(message)
        say(f"node {node} of {nodes} is there: {host}")


class _Other:
    """What node 0 knows of another one."""

    def __init__(self, name: str, host: str, connection: "_Connection", *, is_new: bool) -> None:
        self.name, self.host, self.connection = name, host, connection
        self.devices, self.is_asked_for, self.is_ready = 0, False, False
        self.left: Decision | None = None
        # One that comes again has no ranks in the attempt that is going on.
        self._trouble = f"{name} lost its ranks and came again" if is_new else ""
        self._account: Account | None = None

    def begin(self, layout: Layout) -> None:
        self.is_ready, self._trouble, self._account = False, "", None
        self.connection.send({"start": layout})

    def decided(self, decision: Decision) -> None:
        self.connection.send({"decision": decision})

    def take(self, message: Mapping[str, Any]) -> None:
        """Whoever says what no launch says is no launch, and is lost."""
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


class OtherNode:
    """Any node but the first; the arguments are those of `FirstNode`."""

    def __init__(self, place: Place, supervisor: Supervisor, *, silence_s: float = _SILENCE_SECONDS) -> None:
        self._place, self._supervisor, self._silence = place, supervisor, silence_s
        self._first: _Connection | None = None
        self._trouble = ""
        self._has_told = False
        self._decision: Decision | None = None
        self._layout: Layout | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Go to node 0, and wait there."""
        self._decision, self._layout, self._trouble, self._has_told = None, None, "", False
        while True:
            first = self._go()
            if first is None:
                return None
            first.send({"ready": [devices, is_asked_for]})
            while not first.lost:
                for message in first.receive():
                    self._take(message)
                if self._layout is not None:
                    return self._layout
                # One that comes again may find the others on their way to the next attempt.
                if self._decision is not None and not self._decision.restarts:
                    raise NodeEndedError(f"node 0 ended: {self._decision.why}", self._decision.code)
                if self._supervisor.told:
                    return None
                time.sleep(_LOOK_EVERY_SECONDS)

    def exchange(self, trouble: str) -> str:
        """Ask and tell node 0."""
        if self._first is not None:
            for message in self._first.receive():
                self._take(message)
            if trouble and not self._has_told:
                self._first.send({"trouble": trouble})
                self._has_told = True
            if self._first.lost and self._decision is None:
                return f"node 0 ({self._place.address}) {self._first.lost}"
        return self._trouble

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Tell node 0 and wait for what it says, unless it is lost."""
        assert self._first is not None
        self._first.send({"account": asdict(account)})
        while True:
            self.exchange("")
            if self._decision is not None:
                return self._decision
            if self._first.lost or self._supervisor.at_once:
                return decide([account, Account(lost=f"node 0 ({self._place.address}) {self._first.lost}")])
            time.sleep(_LOOK_EVERY_SECONDS)

    def leave(self, code: int, why: str) -> None:
        """Node 0 ends the others."""
        if self._first is not None:
            self._first.send({"leaves": Decision(code, why, restarts=False)})
            _say_farewell([self._first])

    def _take(self, message: Mapping[str, Any]) -> None:
        if "trouble" in message:
            self._trouble = str(message["trouble"])
        elif "decision" in message:
            self._decision = Decision(*message["decision"])
        elif "start" in message:
            self._layout, self._decision = Layout(*message["start"]), None  # which may be that of the attempt before
        elif "refused" in message:
            raise RecipeError(f"{self._place.address}:{self._place.port} refused: {message['refused']}")

    def _go(self) -> "_Connection | None":
        """The connection to node 0, which is made where there is none; None once this launch is told to end."""
        began, has_told = time.monotonic(), False
        where = f"{self._place.address}:{self._place.port}"
        while self._first is None or self._first.lost:
            if self._supervisor.told:
                return None
            try:
                # By name every time: a node that was replaced has another address.
                found = socket.create_connection((self._place.address, self._place.port), timeout=_CONNECT_SECONDS)
            except OSError as error:
                waited = time.monotonic() - began
                if waited > self._place.wait_s:
                    raise PeerLostError(
                        f"node 0 could not be reached at {where} within {self._place.wait_s:,.0f} s: "
                        f"{error.strerror or error}. Does the launch run there? Is --master its name or address?"
                    ) from None
                if waited > 2 and not has_told:
                    say(f"waits for node 0 at {where} ({error.strerror or error})")
                    has_told = True
                time.sleep(_RECONNECT_SECONDS)
                continue
            self._first = _Connection(found, self._silence)
            hello = {"node": self._place.node, "nodes": self._place.nodes, "host": socket.gethostname()}
            self._first.send(hello)
        return self._first


class _Connection:
    """Lines of JSON each way, with a sign of life every few seconds; `lost` says why there will be no more."""

    def __init__(self, own: socket.socket, silence_s: float) -> None:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lost = ""
        self._socket, self._silence = own, silence_s
        self._received, self._to_send = b"", b""
        self._heard_at = self._spoke_at = time.monotonic()

    def send(self, message: Mapping[str, Any]) -> None:
        """As much as goes now; the rest with the next call of anything here."""
        self._to_send += json.dumps(message).encode() + b"\n"
        self._spoke_at = time.monotonic()
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """What has come since the last time."""
        if self.lost:
            return []
        if time.monotonic() - self._spoke_at > self._silence / _BEATS:
            self.send({})
        self._flush()
        try:
            while chunk := self._socket.recv(1 << 16):
                self._heard_at = time.monotonic()
                self._received += chunk
                if len(self._received) > _MOST_BYTES:
                    break
            else:
                self._lose("has closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"is not reached any more ({error.strerror})")
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._received) > _MOST_BYTES or not all(isinstance(message, dict) for message in messages):
            self._lose("sends what is no message")
            return []
        silent = time.monotonic() - self._heard_at
        if silent > self._silence:
            self._lose(f"has not answered for {silent:.0f} s")
        return [message for message in messages if message]

    def has_said_farewell(self) -> bool:
        """Whether all was sent and the other side has closed: closing first could take from it what was sent."""
        self._flush()
        if not self.lost and not self._to_send:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self.receive()
        return bool(self.lost)

    def close(self) -> None:
        """No more of it."""
        self._lose("was closed")

    def _flush(self) -> None:
        try:
            while self._to_send and not self.lost:
                self._to_send = self._to_send[self._socket.send(self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            self._to_send = b""  # `receive` finds out why, after what the other side still had to say

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._socket.close()


def _say_farewell(connections: Sequence[_Connection]) -> None:
    """Close, once the others have what is left to send; a few seconds for that."""
    until = time.monotonic() + _FAREWELL_SECONDS
    left = list(connections)
    while left and time.monotonic() < until:
        left = [connection for connection in left if not connection.has_said_farewell()]
        time.sleep(_LOOK_EVERY_SECONDS)
    for connection in connections:
        connection.close()


class _Address(NamedTuple):
    family: int
    place: Any  # as socket.bind takes it


def _resolve(place: Place, supervisor: Supervisor) -> _Address | None:
    """What the place's name means; None once this launch is told to end. A new pod's name is known after a while."""
    began, has_told = time.monotonic(), False
    while not supervisor.told:
        try:
            family, _, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
            return _Address(family, address)
        except OSError as error:
            what = f"--master {place.address}: {error.strerror or error}"
            waited = time.monotonic() - began
            if waited > place.wait_s:
                raise PeerLostError(f"{what}, for {place.wait_s:,.0f} s. Is it the name of this node?") from None
            if waited > 2 and not has_told:
                say(f"waits until this name is known: {what}")
                has_told = True
        time.sleep(_RECONNECT_SECONDS)
    return None


def _listen(place: Place, own: _Address | None) -> socket.socket:
    """At the address by which the others know this node, not at every address of this machine.

    At every one where that is not known, where others cannot reach it, as /etc/hosts often has it for a machine's own
    name, or where this machine does not have it itself.
    """
    family = socket.AF_INET if own is None else own.family
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", place.port)
    is_reached = own is not None and not (own.place[0].startswith("127.") or own.place[0] == "::1")
    where = own.place if own is not None and is_reached else everywhere
    until = time.monotonic() + _FAREWELL_SECONDS  # a launch that was here before may be about to end
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen()
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL and where != everywhere:
                where = everywhere
            elif error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(_RECONNECT_SECONDS)
            else:
                raise RecipeError(
                    f"cannot listen at {place.address}:{place.port}: {error.strerror}. Does another launch run on this "
                    f"node? Choose another port for it, --master {place.address}:PORT on all nodes"
                ) from None


def _allow_connections(nodes: int) -> None:
    """Have this process open a file for each node. Raises `RecipeError` where the system allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RecipeError(
            f"node 0 opens a connection to each of {nodes:,} nodes, and may open {hard:,} files: ulimit -n {needed}, "
            f"as root or in /etc/security/limits.conf"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _another_port(before: socket.socket | None) -> socket.socket:
    """A new one for every attempt: ranks that are left of the last one cannot be met there."""
    if before is not None:
        before.close()
    return hold_port()


def _nodes(numbers: Sequence[int]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
