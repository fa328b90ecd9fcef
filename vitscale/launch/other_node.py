"""A node other than node 0 of a launch over several nodes: it connects to node 0 and does what node 0 decides."""

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitscale.ground.errors import PeerLostError, RecipeError
from vitscale.launch.connections import (
    LOOK_EVERY_SECONDS,
    RECONNECT_SECONDS,
    SILENCE_SECONDS,
    Connection,
    read_secret,
    say_farewell,
)
from vitscale.launch.nodes import Account, Decision, FromFirst, Hello, Layout, NodeEndedError, ThisNode
from vitscale.launch.supervisor import Supervisor, say

_CONNECT_SECONDS = 3.0


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
                    raise NodeEndedError(f"node 0 ended: {self._decision.why}", self._decision.code)
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
        began, told = time.monotonic(), ""
        where = f"{self._place.address}:{self._place.port}"
        while self._first is None or self._first.lost:
            if self._supervisor.told:
                return None
            try:
                self._first = self._connect()
            except OSError as error:
                waited, problem = time.monotonic() - began, error.strerror or str(error)
                if waited > self._place.wait_s:
                    raise PeerLostError(
                        f"node 0 could not be reached at {where} within {self._place.wait_s:,.0f} s: {problem}. "
                        f"Does the launch run there? Is --master its name or address? Is --run-dir {self._run_dir} the "
                        f"same folder on all nodes?"
                    ) from None
                if waited > 2 and problem != told:
                    say(f"waits for node 0 at {where} ({problem})")
                    told = problem
                time.sleep(RECONNECT_SECONDS)
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
