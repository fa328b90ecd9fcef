"""TCP connections between the launches of several nodes, with messages as lines of JSON, and node 0's listener.

Node 0 writes a secret for each launch into the run directory, which the nodes share: a file that other users cannot
read. Whoever has it can start ranks on all nodes, and end the run. Each end of a connection begins with a random
number. From both and the secret follows a key of this connection alone, by which every later line begins with an HMAC
of its direction, number and content: nothing of a stranger, of another connection or out of place is read. Nothing is
encrypted.
"""

import contextlib
import errno
import hmac
import json
import os
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitscale.ground.errors import PeerLostError, RecipeError
from vitscale.ground.files.durable import durable_file, make_folder
from vitscale.ground.safe_text import printable
from vitscale.ground.wording import describe_mistake
from vitscale.launch.nodes import FromFirst, ThisNode, ToFirst
from vitscale.launch.supervisor import Supervisor, say
from vitscale.runs.names import SECRET_FILE

SECRET_BYTES = 32
LOOK_EVERY_SECONDS = 0.05
SILENCE_SECONDS = 30.0
RECONNECT_SECONDS = 0.5
_UNTOLD_SECONDS, _TELL_EVERY_SECONDS = 2.0, 60.0
_BEATS = 10  # signs of life sent in SILENCE_SECONDS
_FAREWELL_SECONDS = 5.0
_MOST_BYTES = 1 << 12, 1 << 20  # of a line: of strangers, and of nodes
_MOST_WAITING = 4096  # connections not accepted yet: Python's 128 is fewer than the nodes of a large run
_OTHER_FILES = 256  # for the ranks' output, and for connections that have not said hello yet


# ---- The secret ------------------------------------------------------------------------------------------------------


def write_secret(run_dir: Path, secret: bytes) -> None:
    """Write the secret for the other nodes. Raises `RecipeError` if it cannot be, or others could read it."""
    try:
        make_folder(run_dir)
        with durable_file(run_dir / SECRET_FILE, mode=0o600) as file:
            file.write(secret)
        read_secret(run_dir)
    except OSError as error:
        raise RecipeError(
            f"{run_dir}: {error.strerror or error}. The nodes of a launch know each other by a file there: choose a "
            f"--run-dir that all of them can write to, on a file system with owners and permissions"
        ) from None


def read_secret(run_dir: Path) -> bytes:
    """The secret that node 0 has written. Raises OSError, in words, also if others could have written or read it."""
    path = run_dir / SECRET_FILE
    try:
        with tempfile.TemporaryFile(dir=run_dir) as ours:  # where a server takes root for nobody, files are nobody's
            owner = os.fstat(ours.fileno()).st_uid
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found, secret = os.fstat(file.fileno()), os.read(file.fileno(), SECRET_BYTES + 1)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    about = f"{len(secret)} bytes, {stat.filemode(found.st_mode)}, uid {found.st_uid}"
    if about != (expected := f"{SECRET_BYTES} bytes, -rw-------, uid {owner}"):
        raise OSError(f"{path}: {about}; node 0 writes {expected}")
    return secret


def remove_secret(run_dir: Path, secret: bytes) -> None:
    """Remove the secret, unless another launch has written its own since."""
    with contextlib.suppress(OSError):
        if read_secret(run_dir) == secret:
            (run_dir / SECRET_FILE).unlink()


# ---- Connections -----------------------------------------------------------------------------------------------------


class Connection:
    """Sends and receives messages without blocking, with a sign of life every few seconds.

    `lost` is "" while the connection works, then the reason why it no longer does. `is_proven`: whether the other end
    has proved that it has the secret; before, nothing can be sent to it. `reads` is what the other end sends.
    """

    def __init__(self, own: socket.socket, silence_s: float, secret: bytes, reads: type[ToFirst | FromFirst]) -> None:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lost, self.is_proven = "", False
        self._socket, self._silence, self._secret, self._reads = own, silence_s, secret, reads
        self._number, self._key = os.urandom(SECRET_BYTES), b""
        self._lines_sent = self._lines_read = 0
        self._received, self._to_send = b"", self._number.hex().encode() + b"\n"
        self.began_at = self._heard_at = self._spoke_at = time.monotonic()
        self._flush()

    def send(self, **message: Any) -> None:
        """Send as much as the socket takes now; later calls of any method send the rest."""
        content = json.dumps(message, default=asdict, ensure_ascii=False).encode(errors="replace")
        code = self._authentication(content, self._lines_sent, is_from_first=self._reads is ToFirst)
        self._to_send += code + b" " + content + b"\n"
        self._lines_sent += 1
        self._spoke_at = time.monotonic()
        self._flush()

    def receive(self) -> list[Any]:
        """The messages received since the last call, oldest first."""
        if self.lost:
            return []
        if self._key and time.monotonic() - self._spoke_at > self._silence / _BEATS:
            self.send()
        self._flush()
        most = _MOST_BYTES[self.is_proven]
        try:
            while chunk := self._socket.recv(1 << 16):
                self._received += chunk
                if len(self._received) > most:
                    break
            else:
                self._lose("has closed the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"can no longer be reached ({error.strerror})")
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [message for line in lines if (message := self._read(line)) is not None]
            if len(self._received) > most:
                raise ValueError("a line without end")
        except ValueError as error:
            mistake = describe_mistake(error.errors()[0]) if isinstance(error, ValidationError) else str(error)
            what = f"sends what is not a message ({printable(mistake[:200])})"
            self._lose(what if self.is_proven else "does not prove that it belongs to this launch")
            return []
        silent = time.monotonic() - self._heard_at
        if silent > self._silence:
            self._lose(f"has not answered for {silent:.0f} s")
        return messages

    def _read(self, line: bytes) -> ToFirst | FromFirst | None:
        """The message in a line; None for a sign of life. Raises ValueError for anything else."""
        if not self._key:
            other = bytes.fromhex(line.decode("ascii"))
            if len(other) != SECRET_BYTES:
                raise ValueError("not a random number")
            self._heard_at = time.monotonic()  # by whole lines: single bytes would keep it waiting for hours
            numbers = b"".join(sorted([self._number, other]))
            self._key = hmac.digest(self._secret, b"vitscale launch" + numbers, "sha256")
            self.send()
            return None
        code, _, content = line.partition(b" ")
        expected = self._authentication(content, self._lines_read, is_from_first=self._reads is FromFirst)
        if not hmac.compare_digest(code, expected):
            raise ValueError("a line of somebody else")
        self._lines_read, self.is_proven, self._heard_at = self._lines_read + 1, True, time.monotonic()
        message = self._reads.model_validate_json(content)
        return message if message.model_fields_set else None

    def _authentication(self, content: bytes, number: int, *, is_from_first: bool) -> bytes:
        return hmac.digest(self._key, b"%d %d " % (is_from_first, number) + content, "sha256").hex().encode()

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


# ---- Waiting ---------------------------------------------------------------------------------------------------------


class Patience:
    """Waits for what other nodes have to do first, for at most the place's `wait_s` seconds; says so now and then."""

    def __init__(self, place: ThisNode, supervisor: Supervisor) -> None:
        self._most, self._supervisor = place.wait_s, supervisor
        self._began, self._tell_after = time.monotonic(), _UNTOLD_SECONDS

    def wait(self, seconds: float, what: str, failure: str) -> bool:
        """Wait `seconds` for `what`; False once told to end. Raises the failure's `PeerLostError` after that time."""
        waited = time.monotonic() - self._began
        if waited > self._most:
            raise PeerLostError(failure)
        if waited > self._tell_after:
            say(f"waits for {what}")
            self._tell_after = waited + _TELL_EVERY_SECONDS
        time.sleep(seconds)
        return self._supervisor.told is None


# ---- Node 0's listener -----------------------------------------------------------------------------------------------


def resolve(place: ThisNode, supervisor: Supervisor) -> tuple[int, Any] | None:
    """Look up the place's address, trying again for `place.wait_s`: a new pod's name is not known at once.

    Returns (family, what socket.bind takes), or None once this launch is told to end. Raises `PeerLostError` if the
    name stays unknown.
    """
    patience = Patience(place, supervisor)
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
            return family, address
        except OSError as error:
            what = f"--master {place.address}: {error.strerror or error}"
        failure = f"{what}, for {place.wait_s:,.0f} s. Is it the name of this node?"
        if not patience.wait(RECONNECT_SECONDS, f"this name to resolve: {what}", failure):
            return None


def listen(place: ThisNode, own: tuple[int, Any] | None) -> socket.socket:
    """A socket that listens at the address by which the others know this node, not at every address of this machine.

    It does listen at every address if that one is unknown (`own` is None), is a loopback address, which others cannot
    reach (/etc/hosts often has one for a machine's own name), or is not an address of this machine. Raises
    `RecipeError` if the port cannot be had.
    """
    family, where = own or (socket.AF_INET, None)
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", place.port)
    if where is None or where[0].startswith("127.") or where[0] == "::1":
        where = everywhere
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
