"""launch.jsonl: what became of each attempt of a run, one line an event, of all launches one after another."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitscale.errors import DataError
from vitscale.runs.reading import count, number, parse_object, text, timestamp

_MOST_BYTES = 4 << 20  # the end of the file; an event is some hundred bytes
_AT_ONCE_S = 30.0  # between the launches of several nodes, which tell of each attempt alike


class Journal:
    """Lines with time (UTC), event, host and attempt (from 1), besides what the event has to tell.

    Lines wait until a rank has made the folder, or until a restart: a launch that is refused before anything began
    leaves nothing. A folder that cannot be written is told once and costs nothing but the lines.

    Args:
        path: of launch.jsonl.
        say: prints a line for people.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.attempt = 0
        self._path, self._say = path, say
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
                self._say(f"WARNING: {self._path} cannot be written ({error.strerror}); going on without it")
            self._has_complained = True


@dataclass(frozen=True)
class Event:
    """One line.

    Attributes:
        what: `started`, `restart` or `finished`.
        time: in seconds since 1970.
        host: of the launch.
        attempt: of the launch, from 1.
        cause: in words; empty where there is none.
        exit_code: of the launch, where it has finished.
        pause_s: before a restart.
    """

    what: str
    time: float
    host: str
    attempt: int | None
    cause: str
    exit_code: int | None
    pause_s: float


@dataclass(frozen=True)
class Launches:
    """All launches of a run; those of several nodes that act together are one.

    Attributes:
        count: of launches.
        restarts: by these, oldest first.
        last: event of all.
        unfinished_on: hosts whose launch has not said that it is finished.
        damaged: lines that cannot be used.
    """

    count: int
    restarts: list[Event]
    last: Event | None
    unfinished_on: set[str]
    damaged: int


def read_launches(path: Path) -> Launches:
    """Of a run's launch.jsonl; without the file, none. Raises `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            is_cut = file.tell() > 0
            lines = file.read(_MOST_BYTES).split(b"\n")[is_cut:-1]
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    launches: list[Event] = []
    restarts: list[Event] = []
    last_on: dict[str, Event] = {}
    last, damaged = None, 0
    for line in lines:
        row = parse_object(line)
        time = timestamp(row.get("time")) if row else None
        if row is None or time is None:
            damaged += 1
            continue
        if row.get("event") not in ("started", "restart", "finished"):
            continue
        last = Event(
            what=row["event"],
            time=time,
            host=text(row.get("host")),
            attempt=count(row.get("attempt")),
            cause=text(row.get("cause")),
            exit_code=count(row.get("exit_code")),
            pause_s=number(row.get("pause_s")) or 0.0,
        )
        last_on[last.host] = last
        if last.what == "started" and last.attempt == 1 and not _is_told(last, launches):
            launches.append(last)
        if last.what == "restart" and not _is_told(last, restarts):
            restarts.append(last)
    unfinished_on = {host for host, event in last_on.items() if event.what != "finished"}
    return Launches(len(launches), restarts, last, unfinished_on, damaged)


def _is_told(event: Event, told: list[Event]) -> bool:
    """Whether the last one of those told is the same, by another node."""
    last = told[-1] if told else event
    return last.host != event.host and last.attempt == event.attempt and abs(event.time - last.time) < _AT_ONCE_S
