"""A launch over several nodes: the others connect to node 0, which decides for all, and do what it decides."""

import contextlib
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from vitscale.ground.errors import PeerLostError, RecipeError, VitscaleError
from vitscale.launch.connections import (
    LOOK_EVERY_SECONDS,
    RECONNECT_SECONDS,
    SECRET_BYTES,
    SILENCE_SECONDS,
    Connection,
    Patience,
    allow_connections,
    listen,
    read_secret,
    remove_secret,
    resolve,
    say_farewell,
    write_secret,
)
from vitscale.launch.ends import EXIT_RETRY
from vitscale.launch.nodes import Account, Decision, FromFirst, Hello, Layout, ThisNode, ToFirst, another_port, fitting
from vitscale.launch.supervisor import Supervisor, say

_MOST_STRANGERS = 64  # connections that are yet to prove themselves, beside one for each node that is missing
_STRANGER_SECONDS = 10.0  # that they have for it
_PROOF_SECONDS = 1.0  # that they have if others wait; an answer takes one round trip
_MOST_AT_ONCE = 1024  # that are accepted before any is read
_CONNECT_SECONDS = 3.0


class FirstNode:
    """Node 0, to which the other nodes connect. All nodes share the run directory.

    A node that has not been heard from for `silence_s` seconds counts as lost. Raises `PeerLostError` if the place's
    name stays unknown, `RecipeError` if its port or the secret cannot be had.
    """

    def __init__(
        self,
        place: ThisNode,
        global_batch: int | None,
        supervisor: Supervisor,
        run_dir: Path,
        *,
        silence_s: float = SILENCE_SECONDS,
    ) -> None:
        self._place, self._global_batch, self._supervisor, self._silence = place, global_batch, supervisor, silence_s
        allow_connections(place.nodes)
        self._listener = listen(place, resolve(place, supervisor))
        self._run_dir, self._secret = run_dir, os.urandom(SECRET_BYTES)
        write_secret(run_dir, self._secret)
        self._strangers: dict[Connection, str] = {}  # with the host that each comes from, the oldest first
        self._others: dict[int, _Other] = {}
        self._trouble = ""
        self._port: socket.socket | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Wait for the other nodes, then send each its ranks."""
        place, patience = self._place, Patience(self._place, self._supervisor)
        while missing := self._missing():
            nodes, where = ", ".join(map(str, missing)), f"{place.address}:{place.port}"
            who = f"node{'' if len(missing) == 1 else 's'} {nodes} of {place.nodes}"
            failure = (
                f"{who} did not connect to {where} within {place.wait_s:,.0f} s. Does the launch run there, with this "
                f"--master and --nodes? Can that machine resolve the name and reach the port?"
            )
            if not patience.wait(LOOK_EVERY_SECONDS, f"{who} at {where}", failure):
                return None
            self._poll()
            for other in self._others.values():
                if other.left is not None:
                    why = f"{other.name} ended: {other.left.why}"
                    raise VitscaleError(why).with_code(other.left.code or EXIT_RETRY)
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
                    other.connection.send(trouble=first)
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
            other.connection.send(decision=decision)
        if not decision.restarts:
            say_farewell([other.connection for other in self._others.values()])
            remove_secret(self._run_dir, self._secret)

    def _missing(self) -> list[int]:
        ready = {node for node, other in self._others.items() if other.is_ready}
        return [node for node in range(1, self._place.nodes) if node not in ready]

    def _poll(self) -> None:
        most = _MOST_STRANGERS + self._place.nodes - sum(not other.connection.lost for other in self._others.values())
        with contextlib.suppress(OSError):  # nobody else is there, or whoever was has gone, or files have run out
            for _ in range(_MOST_AT_ONCE):
                oldest = self._oldest() if len(self._strangers) >= most else None
                if len(self._strangers) >= most and oldest is None:
                    break  # each may still prove itself: the others wait for their turn
                new, (host, *_) = self._listener.accept()
                self._strangers[Connection(new, self._silence, self._secret, ToFirst)] = host
                if oldest is not None:
                    oldest.close()
                    del self._strangers[oldest]
        for stranger in list(self._strangers):
            messages = stranger.receive()
            if messages:
                self._welcome(stranger, *messages)
            elif time.monotonic() - stranger.began_at > _STRANGER_SECONDS:
                stranger.close()
            if messages or stranger.lost:
                del self._strangers[stranger]
        for other in self._others.values():
            for message in other.connection.receive():
                other.take(message)

    def _oldest(self) -> Connection | None:
        """The oldest stranger of the host that has most of them; if no host has two, the oldest, once it is late."""
        [(busiest, count)] = Counter(self._strangers.values()).most_common(1)
        oldest = next(one for one, host in self._strangers.items() if host == busiest or count == 1)
        return oldest if count > 1 or time.monotonic() - oldest.began_at > _PROOF_SECONDS else None

    def _welcome(self, stranger: Connection, first: ToFirst, *messages: ToFirst) -> None:
        """Register a node by its hello message, or refuse it; then handle the messages that came with it."""
        if first.hello is None:
            return stranger.close()
        node, nodes, host, launch = first.hello
        known, refusal = self._others.get(node), ""
        if nodes != self._place.nodes or node >= nodes:
            refusal = f"this is node {node} of {nodes}, but node 0 was started as one of {self._place.nodes}"
        elif known is not None and known.launch == launch:
            known.connection.close()  # its earlier connection broke, and only that node has noticed
        elif known is not None and not known.connection.lost:
            refusal = f"node {node} is already connected, from {known.host}; every node needs its own --node-rank"
        if refusal:
            stranger.send(refused=refusal)
            return say_farewell([stranger])
        self._others[node] = _Other(f"node {node} ({host})", host, launch, stranger, is_new=known is not None)
        for message in messages:
            self._others[node].take(message)
        say(f"node {node} of {nodes} is there: {host}")


class _Other:
    """What node 0 knows about one of the other nodes."""

    def __init__(self, name: str, host: str, launch: str, connection: Connection, *, is_new: bool) -> None:
        self.name, self.host, self.launch, self.connection = name, host, launch, connection
        self.devices, self.is_asked_for, self.is_ready = 0, False, False
        self.left: Decision | None = None
        # A node that reconnects has no ranks in the current attempt.
        self._trouble = f"{name} lost its ranks and reconnected" if is_new else ""
        self._account: Account | None = None

    def begin(self, layout: Layout) -> None:
        self.is_ready, self._trouble, self._account = False, "", None
        self.connection.send(start=layout)

    def take(self, message: ToFirst) -> None:
        if message.ready is not None:
            (self.devices, self.is_asked_for), self.is_ready = message.ready, True
        if message.trouble is not None:
            self._trouble = f"{self.name}: {message.trouble}"
        if message.account is not None:
            self._account = message.account
        if message.leaves is not None:
            self.left = message.leaves
            self._trouble = f"{self.name} ended: {self.left.why}"

    def trouble(self) -> str:
        lost = self.connection.lost and self._account is None
        return self._trouble or (f"{self.name} {self.connection.lost}" if lost else "")

    def conclusion(self) -> Account | None:
        if self._account is None and (self.connection.lost or self.is_ready or self.left):
            return Account(lost=self.trouble())
        return self._account


class OtherNode:
    """A node other than node 0; arguments as in `FirstNode`."""

    def __init__(
        self, place: ThisNode, supervisor: Supervisor, run_dir: Path, *, silence_s: float = SILENCE_SECONDS
    ) -> None:
        self._place, self._supervisor, self._run_dir, self._silence = place, supervisor, run_dir, silence_s
        self._hello = Hello(place.node, place.nodes, socket.gethostname(), secrets.token_hex(8))
        self._first: Connection | None = None
        self._trouble = ""
        self._has_told = False
        self._decision: Decision | None = None
        self._layout: Layout | None = None

    def meet(self, devices: int, is_asked_for: bool) -> Layout | None:
        """Connect to node 0 and wait until it sends this node's ranks."""
        self._decision, self._layout, self._trouble, self._has_told = None, None, "", False
        while True:
            first = self._go()
            if first is None:
                return None
            first.send(ready=(devices, is_asked_for))
            while not first.lost:
                for message in first.receive():
                    self._take(message)
                if self._layout is not None:
                    if self._layout.ranks > devices:
                        raise PeerLostError(f"node 0 asks this node for {self._layout.ranks} ranks; it has {devices}")
                    return self._layout
                # A node that reconnects may find the others about to restart: only a decision to end counts here.
                if self._decision is not None and not self._decision.restarts:
                    raise VitscaleError(f"node 0 ended: {self._decision.why}").with_code(self._decision.code)
                if self._supervisor.told:
                    return None
                time.sleep(LOOK_EVERY_SECONDS)

    def exchange(self, trouble: str) -> str:
        """Tell node 0 of a failure here, once, and return a failure elsewhere, or ""."""
        if self._first is not None:
            for message in self._first.receive():
                self._take(message)
            if trouble and not self._has_told:
                self._first.send(trouble=trouble)
                self._has_told = True
            if self._first.lost and self._decision is None:
                return f"node 0 ({self._place.address}) {self._first.lost}"
        return self._trouble

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Send the account to node 0 and return its decision; decide here if node 0 is lost."""
        assert self._first is not None
        self._first.send(account=account)
        while True:
            self.exchange("")
            if self._decision is not None:
                return self._decision
            if self._first.lost or self._supervisor.at_once:
                return decide([account, Account(lost=f"node 0 ({self._place.address}) {self._first.lost}")])
            time.sleep(LOOK_EVERY_SECONDS)

    def leave(self, code: int, why: str) -> None:
        """Tell node 0 that this launch ends; node 0 ends the others."""
        if self._first is not None:
            self._first.send(leaves=Decision(code, why, restarts=False))
            say_farewell([self._first])

    def _take(self, message: FromFirst) -> None:
        if message.trouble is not None:
            self._trouble = message.trouble
        if message.decision is not None:
            self._decision = message.decision
        if message.start is not None:
            self._layout, self._decision = message.start, None  # the decision was the last attempt's
        if message.refused is not None:
            raise RecipeError(f"{self._place.address}:{self._place.port} refused: {message.refused}")

    def _go(self) -> Connection | None:
        """The connection to node 0, made anew if there is none; None once this launch is told to end."""
        place, patience = self._place, Patience(self._place, self._supervisor)
        while self._first is None or self._first.lost:
            try:
                self._first = self._connect()
                continue
            except OSError as error:
                problem = error.strerror or str(error)
            where = f"{place.address}:{place.port}"
            failure = (
                f"node 0 could not be reached at {where} within {place.wait_s:,.0f} s: {problem}. Does the launch run "
                f"there? Is --master its name or address? Is --run-dir {self._run_dir} the same folder on all nodes?"
            )
            if not patience.wait(RECONNECT_SECONDS, f"node 0 at {where} ({problem})", failure):
                return None
        return self._first

    def _connect(self) -> Connection:
        """A connection that both ends have proved, by name and secret as they are now. Raises OSError."""
        with socket.create_connection((self._place.address, self._place.port), timeout=_CONNECT_SECONDS) as found:
            first = Connection(found.dup(), self._silence, read_secret(self._run_dir), FromFirst)
        while not (first.is_proven or first.lost or self._supervisor.told):
            first.receive()
            time.sleep(LOOK_EVERY_SECONDS)
        if not first.is_proven:
            first.close()
            raise OSError(f"whoever answers {first.lost}, and has not proved to be node 0 of this launch")
        first.send(hello=self._hello)
        return first
