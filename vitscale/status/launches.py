"""launch.jsonl: what `vitscale launch` tells of its attempts."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vitscale.errors import DataError
from vitscale.status.reading import count, number, parse_object, text

_MOST_BYTES = 4 << 20  # the end of the file; an event is some hundred bytes


@dataclass(frozen=True)
class Event:
    """One line.

    Attributes:
        what: `started`, `rank ended`, `restart` or `finished`.
        time: in seconds since 1970.
        host: of the launch.
        cause: in words; empty where there is none.
        exit_code: of the launch, where it has finished.
        pause_s: before a restart.
    """

    what: str
    time: float
    host: str
    cause: str
    exit_code: int | None
    pause_s: float


@dataclass(frozen=True)
class Launches:
    """All launches of a run.

    Attributes:
        count: of launches.
        restarts: by these, oldest first.
        last: event of all.
        damaged: lines that cannot be used.
    """

    count: int
    restarts: list[Event]
    last: Event | None
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
    launches = damaged = 0
    restarts: list[Event] = []
    last = None
    for line in lines:
        row = parse_object(line)
        time = _seconds(text(row.get("time"))) if row else None
        if row is None or time is None:
            damaged += 1
            continue
        last = Event(
            what=text(row.get("event")),
            time=time,
            host=text(row.get("host")),
            cause=text(row.get("cause")),
            exit_code=count(row.get("exit_code")),
            pause_s=number(row.get("pause_s")) or 0.0,
        )
        launches += last.what == "started" and row.get("attempt") == 1
        if last.what == "restart":
            restarts.append(last)
    return Launches(launches, restarts, last, damaged)


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None
