"""launch.jsonl: how each attempt of a run began and ended, one line per event, over all launches of the run."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from vitscale.ground.errors import DataError
from vitscale.ground.files.durable import make_folder
from vitscale.ground.storage import regular
from vitscale.runs.reading import count, number, parse_object, text, timestamp

_MOST_BYTES = 4 << 20  # only the end of the file is read; an event has some hundred bytes
_AT_ONCE_S = 30.0  # lines of several nodes about the same attempt are at most this far apart


class Journal:
    """Writes launch.jsonl: lines with time (UTC), event, host and attempt (from 1), and the event's own fields.

    Lines wait until a rank has made the folder, or until a restart, so a launch that is refused before anything began
    leaves no file. A folder that cannot be written is reported once, by `say`, and only the lines are lost.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.attempt = 0
        self._path, self._say = path, say
        self._waiting = b""
        self._has_complained = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one line, together with those that waited, in a single write."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, "host": socket.gethostname(), "attempt": self.attempt, **fields}
        self._waiting += (json.dumps(line) + "\n").encode()
        self.flush(creates_folder=event == "restart")

    def flush(self, *, creates_folder: bool = False) -> None:
        """Append the lines that wait, if there is a folder for them by now."""
        if not self._waiting:
            return
        try:
            if creates_folder:
                make_folder(self._path.parent)
            elif not self._path.parent.is_dir():
                return
            with FileIO(self._path, "a", opener=regular) as file:
                file.write(self._waiting)
                self._waiting = b""
        except OSError as error:
            if not self._has_complained:
                self._say(f"WARNING: {self._path} cannot be written ({error.strerror}); continuing without it")
            self._has_complained = True


@dataclass(frozen=True)
class Event:
    """One line of launch.jsonl."""

    what: str  # `started`, `restart` or `finished`
    time: float  # when it was written, in seconds since 1970
    host: str
    attempt: int | None  # of this launch, from 1
    cause: str  # in words; "" if there is none
    exit_code: int | None  # of the launch, if it has finished
    pause_s: float  # before a restart


@dataclass(frozen=True)
class Launches:
    """All launches of a run; the launches of several nodes that act together count as one."""

    count: int
    restarts: list[Event]  # oldest first
    last: Event | None  # of any launch
    unfinished_on: set[str]  # the hosts whose last launch has not reported that it finished
    damaged: int  # unusable lines


def read_launches(path: Path) -> Launches:
    """Read a run's launch.jsonl; without the file there are no launches. Raises `DataError` if it cannot be read."""
    try:
        with FileIO(path, opener=regular) as file:
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
        if last.what == "started" and last.attempt == 1 and not _is_repeated(last, launches):
            launches.append(last)
        if last.what == "restart" and not _is_repeated(last, restarts):
            restarts.append(last)
    unfinished_on = {host for host, event in last_on.items() if event.what != "finished"}
    return Launches(len(launches), restarts, last, unfinished_on, damaged)


def _is_repeated(event: Event, earlier: list[Event]) -> bool:
    """Whether another node has already reported this event, as the last one of `earlier`."""
    last = earlier[-1] if earlier else event
    return last.host != event.host and last.attempt == event.attempt and abs(event.time - last.time) < _AT_ONCE_S
