"""launch.jsonl: what became of each attempt of a run, one line an event, of all launches one after another."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitscale.launch.supervisor import say


class Journal:
    """Lines with time (UTC), event, host and attempt (from 1), besides what the event has to tell.

    Lines wait until a rank has made the folder, or until a restart: a launch that is refused before anything began
    leaves nothing. A folder that cannot be written is told once and costs nothing but the lines.
    """

    def __init__(self, path: Path) -> None:
        self.attempt = 0
        self._path = path
        self._waiting = b""
        self._has_complained = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one line, in one piece with those that waited."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, "host": socket.gethostname(), "attempt": self.attempt, **fields}
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            if event == "restart":
                self._path.parent.mkdir(parents=True, exist_ok=True)
            elif not self._path.parent.is_dir():
                return
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, self._waiting)
                self._waiting = b""
            finally:
                os.close(file)
        except OSError as error:
            if not self._has_complained:
                say(f"WARNING: {self._path} cannot be written ({error.strerror}); going on without it")
            self._has_complained = True
