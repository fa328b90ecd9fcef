"""A TCP proxy in front of a real server, which spoils what passes through it as a test says."""

import socket
import struct
import threading
import time
from contextlib import suppress

_BLOCK = 16 << 10


class TcpProxy:
    """Passes bytes to and from a server of this machine. All settings may change at any time.

    Attributes:
        port: where it listens.
        rate: bytes a second of each connection from the server; None for as fast as it can.
        silent: whether it takes what clients say and answers nothing.
        cut: how many more connections are reset once `after` bytes have come from the server in them.
        flip: in how many more connections a bit of the byte `after` is turned.
        after: see there.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.rate: float | None = None
        self.silent = False
        self.cut = self.flip = 0
        self.after = 0
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.come_back()

    def come_back(self) -> None:
        """Listen, also once more after `go_away`, on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def go_away(self) -> None:
        """Reset all connections and refuse new ones."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # else a thread in accept() keeps it alive
            self._listener.close()
            self._listener = None
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            _reset(connection)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                return
            with self._lock:
                self._connections += [client, server]
            threading.Thread(target=self._upward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._downward, args=(client, server), daemon=True).start()

    def _upward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while block := client.recv(_BLOCK):
                if not self.silent:
                    server.sendall(block)
            server.shutdown(socket.SHUT_WR)

    def _downward(self, client: socket.socket, server: socket.socket) -> None:
        passed = 0
        with suppress(OSError):
            while block := bytearray(server.recv(_BLOCK if self.rate is None else 1 << 10)):
                if self.cut and passed + len(block) > self.after:
                    self.cut -= 1
                    _reset(client)
                    _reset(server)
                    return
                if self.flip and 0 <= self.after - passed < len(block):
                    self.flip -= 1
                    block[self.after - passed] ^= 1
                if self.silent:
                    continue
                client.sendall(block)
                passed += len(block)
                if (rate := self.rate) is not None:
                    time.sleep(len(block) / rate)
            client.shutdown(socket.SHUT_WR)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
