"""Connections between the launches of several nodes: lines of JSON each way, and where the first node listens."""

import contextlib
import errno
import json
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitscale.errors import PeerLostError, RecipeError
from vitscale.launch.nodes import Place
from vitscale.launch.supervisor import Supervisor, say

LOOK_EVERY_SECONDS = 0.05
SILENCE_SECONDS = 30.0
RECONNECT_SECONDS = 0.5
_BEATS = 10  # in the time of silence
_FAREWELL_SECONDS = 5.0
_MOST_BYTES = 1 << 20
_OTHER_FILES = 256  # those of the ranks' output, and of strangers


class Connection:
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


def say_farewell(connections: Sequence[Connection]) -> None:
    """Close, once the others have what is left to send; a few seconds for that."""
    until = time.monotonic() + _FAREWELL_SECONDS
    left = list(connections)
    while left and time.monotonic() < until:
        left = [connection for connection in left if not connection.has_said_farewell()]
        time.sleep(LOOK_EVERY_SECONDS)
    for connection in connections:
        connection.close()


class Address(NamedTuple):
    family: int
    place: Any  # as socket.bind takes it


def resolve(place: Place, supervisor: Supervisor) -> Address | None:
    """What the place's name means; None once this launch is told to end. A new pod's name is known after a while."""
    began, has_told = time.monotonic(), False
    while not supervisor.told:
        try:
            family, _, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
            return Address(family, address)
        except OSError as error:
            what = f"--master {place.address}: {error.strerror or error}"
            waited = time.monotonic() - began
            if waited > place.wait_s:
                raise PeerLostError(f"{what}, for {place.wait_s:,.0f} s. Is it the name of this node?") from None
            if waited > 2 and not has_told:
                say(f"waits until this name is known: {what}")
                has_told = True
        time.sleep(RECONNECT_SECONDS)
    return None


def listen(place: Place, own: Address | None) -> socket.socket:
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
                time.sleep(RECONNECT_SECONDS)
            else:
                raise RecipeError(
                    f"cannot listen at {place.address}:{place.port}: {error.strerror}. Does another launch run on this "
                    f"node? Choose another port for it, --master {place.address}:PORT on all nodes"
                ) from None


def allow_connections(nodes: int) -> None:
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
