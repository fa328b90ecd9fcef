"""launch.jsonl: what `vitscale launch` tells of its attempts."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vitscale.errors import DataError
from vitscale.status.reading import count, number, parse_object, text

_MOST_BYTES = 4 << 20  # the end of the file; an event is some hundred bytes
_AT_ONCE_S = 30.0  # between the launches of several nodes, which tell of each attempt alike


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
        time = _seconds(text(row.get("time"))) if row else None
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


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None
