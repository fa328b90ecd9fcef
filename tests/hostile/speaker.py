"""One end of the connection between two launches, written from its description and not from its code."""

import contextlib
import hashlib
import hmac
import json
import os
import socket
from typing import Any


class Speaker:
    """Speaks as node 0 (`is_first`) or as another node, with a secret that may be wrong; everything that it sends and
    receives is kept."""

    def __init__(self, connected: socket.socket, secret: bytes, *, is_first: bool = False) -> None:
        connected.settimeout(10)
        self.socket, self.is_first, self.sent, self.number = connected, is_first, 0, os.urandom(32)
        self._lines = connected.makefile("rb")
        self.say(self.number.hex().encode())
        self.theirs = self.line()
        both = b"".join(sorted([self.number, bytes.fromhex(self.theirs.decode())]))
        self.key = hmac.new(secret, b"vitscale launch" + both, hashlib.sha256).digest()

    def say(self, line: bytes) -> None:
        """A line as it is."""
        with contextlib.suppress(OSError):  # the other end has had enough, as what follows notices
            self.socket.sendall(line + b"\n")

    def line(self) -> bytes:
        """The next line; empty once the other end has closed."""
        try:
            return self._lines.readline().rstrip(b"\n")
        except ConnectionError:
            return b""

    def sealed(self, content: bytes, number: int | None = None, is_first: bool | None = None) -> bytes:
        number = self.sent if number is None else number
        direction = int(self.is_first if is_first is None else is_first)
        code = hmac.new(self.key, b"%d %d " % (direction, number) + content, hashlib.sha256).hexdigest()
        return code.encode() + b" " + content

    def tell(self, message: Any) -> None:
        """A message with its authentication; bytes are taken as they are."""
        self.say(self.sealed(message if isinstance(message, bytes) else json.dumps(message).encode()))
        self.sent += 1

    def hear(self, key: str) -> Any:
        """What the next message of a kind says; None if the other end closes before."""
        while line := self.line():
            found = json.loads(line.partition(b" ")[2])
            if key in found:
                return found[key]
        return None

    def is_closed(self) -> bool:
        """Whether the other end closes, whatever it says before."""
        while self.line():
            pass
        return True


def come(port: int, secret: bytes, node: int = 1, nodes: int = 2, launch: str = "") -> Speaker:
    """A node that says hello."""
    speaker = Speaker(socket.create_connection(("127.0.0.1", port), timeout=10), secret)
    speaker.tell({"hello": [node, nodes, "host", launch or os.urandom(4).hex()]})
    return speaker
