"""A node other than node 0 of a launch over several nodes: it connects to node 0 and does what node 0 decides."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vitscale.errors import PeerLostError, RecipeError
from vitscale.launch.connections import (
    LOOK_EVERY_SECONDS,
    RECONNECT_SECONDS,
    SILENCE_SECONDS,
    Connection,
    say_farewell,
)
from vitscale.launch.nodes import Account, Decision, Layout, NodeEndedError, ThisNode
from vitscale.launch.supervisor import Supervisor, say

_CONNECT_SECONDS = 3.0


class OtherNode:
    """A node other than node 0; arguments as in `FirstNode`."""

    def __init__(self, place: ThisNode, supervisor: Supervisor, *, silence_s: float = SILENCE_SECONDS) -> None:
        self._place, self._supervisor, self._silence = place, supervisor, silence_s
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
            first.send({"ready": [devices, is_asked_for]})
            while not first.lost:
                for message in first.receive():
                    self._take(message)
                if self._layout is not None:
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
                self._first.send({"trouble": trouble})
                self._has_told = True
            if self._first.lost and self._decision is None:
                return f"node 0 ({self._place.address}) {self._first.lost}"
        return self._trouble

    def conclude(self, account: Account, decide: Callable[[Sequence[Account]], Decision]) -> Decision:
        """Send the account to node 0 and return its decision; decide here if node 0 is lost."""
        assert self._first is not None
        self._first.send({"account": asdict(account)})
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
            self._first.send({"leaves": Decision(code, why, restarts=False)})
            say_farewell([self._first])

    def _take(self, message: Mapping[str, Any]) -> None:
        if "trouble" in message:
            self._trouble = str(message["trouble"])
        elif "decision" in message:
            self._decision = Decision(*message["decision"])
        elif "start" in message:
            self._layout, self._decision = Layout(*message["start"]), None  # the decision was the last attempt's
        elif "refused" in message:
            raise RecipeError(f"{self._place.address}:{self._place.port} refused: {message['refused']}")

    def _go(self) -> Connection | None:
        """The connection to node 0, made anew if there is none; None once this launch is told to end."""
        began, has_told = time.monotonic(), False
        where = f"{self._place.address}:{self._place.port}"
        while self._first is None or self._first.lost:
            if self._supervisor.told:
                return None
            try:
                # The name is looked up again each time: a replaced node has another address.
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
                time.sleep(RECONNECT_SECONDS)
                continue
            self._first = Connection(found, self._silence)
            hello = {"node": self._place.node, "nodes": self._place.nodes, "host": socket.gethostname()}
            self._first.send(hello)
        return self._first
