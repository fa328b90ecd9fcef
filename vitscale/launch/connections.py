"""TCP connections between the launches of several nodes, with messages as lines of JSON, and node 0's listener."""

import contextlib
import errno
import json
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitscale.errors import PeerLostError, RecipeError
from vitscale.launch.nodes import ThisNode
from vitscale.launch.supervisor import Supervisor, say

LOOK_EVERY_SECONDS = 0.05
SILENCE_SECONDS = 30.0
RECONNECT_SECONDS = 0.5
_BEATS = 10  # signs of life sent in SILENCE_SECONDS
_FAREWELL_SECONDS = 5.0
_MOST_BYTES = 1 << 20
_MOST_WAITING = 4096  # connections not accepted yet: Python's 128 is fewer than the nodes of a large run
_OTHER_FILES = 256  # for the ranks' output, and for connections that have not said hello yet


class Connection:
    """Sends and receives lines of JSON without blocking, with a sign of life every few seconds.

    `lost` is "" while the connection works, then the reason why it no longer does.
    """

    def __init__(self, own: socket.socket, silence_s: float) -> None:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lost = ""
        self._socket, self._silence = own, silence_s
        self._received, self._to_send = b"", b""
        self._heard_at = self._spoke_at = time.monotonic()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send as much as the socket takes now; later calls of any method send the rest."""
        self._to_send += json.dumps(message).encode() + b"\n"
        self._spoke_at = time.monotonic()
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages received since the last call, oldest first."""
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
            self._lose(f"can no longer be reached ({error.strerror})")
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if len(self._received) > _MOST_BYTES or not all(isinstance(message, dict) for message in messages):
            self._lose("sends something that is not a message")
            return []
        silent = time.monotonic() - self._heard_at
        if silent > self._silence:
            self._lose(f"has not answered for {silent:.0f} s")
        return [message for message in messages if message]

    def has_said_farewell(self) -> bool:
        """Whether everything was sent and the other side has closed; closing first could lose what was sent."""
        self._flush()
        if not self.lost and not self._to_send:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self.receive()
        return bool(self.lost)

    def close(self) -> None:
        """Close the connection at once; what was not sent yet is dropped."""
        self._lose("was closed")

    def _flush(self) -> None:
        try:
            while self._to_send and not self.lost:
                self._to_send = self._to_send[self._socket.send(self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            self._to_send = b""  # `receive` finds the reason, after reading what the other side had still sent

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._socket.close()


def say_farewell(connections: Sequence[Connection]) -> None:
    """Close the connections once the other sides have received everything, or after 5 s."""
    until = time.monotonic() + _FAREWELL_SECONDS
    left = list(connections)
    while left and time.monotonic() < until:
        left = [connection for connection in left if not connection.has_said_farewell()]
        time.sleep(LOOK_EVERY_SECONDS)
    for connection in connections:
        connection.close()


class Address(NamedTuple):
    family: int
    place: Any  # what socket.bind takes


def resolve(place: ThisNode, supervisor: Supervisor) -> Address | None:
    """Look up the place's address, trying again for `place.wait_s`: a new pod's name is not known at once.

    Returns None once this launch is told to end. Raises `PeerLostError` if the name stays unknown.
    """
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
                say(f"waits for this name to resolve: {what}")
                has_told = True
        time.sleep(RECONNECT_SECONDS)
    return None


def listen(place: ThisNode, own: Address | None) -> socket.socket:
    """A socket that listens at the address by which the others know this node, not at every address of this machine.

    It does listen at every address if that one is unknown (`own` is None), is a loopback address, which others cannot
    reach (/etc/hosts often has one for a machine's own name), or is not an address of this machine. Raises
    `RecipeError` if the port cannot be had.
    """
    family = socket.AF_INET if own is None else own.family
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", place.port)
    is_reached = own is not None and not (own.place[0].startswith("127.") or own.place[0] == "::1")
    where = own.place if own is not None and is_reached else everywhere
    until = time.monotonic() + _FAREWELL_SECONDS  # an earlier launch may be about to end and free the port
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(_MOST_WAITING)
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
    """Raise this process's limit of open files to fit a connection per node. Raises `RecipeError` if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RecipeError(
            f"node 0 opens a connection to each of {nodes:,} nodes, and may open {hard:,} files: ulimit -n {needed}, "
            f"as root or in /etc/security/limits.conf"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
