"""Judges whether a run trains, and if not, what ended it."""

from typing import Literal

from vitscale.ground.errors import EXIT_DONE, PreemptedError
from vitscale.runs.launches import Event

_Ended = Literal["done", "stopped early", "preempted", "stopped", "failed"]
State = Literal[_Ended, "running", "starting", "restarting", "not running", "unknown"]
"""`stopped early` is done: no evaluation was better for long; `stopped` is not: it was started with --stop-at."""

_TO_START_S = 600.0  # importing torch from a slow file system, and starting as many processes as there are devices
_LATER_S = 5.0  # two clocks may differ by this


def judge(
    is_held: bool | None,  # by a rank, seen from this machine; None if that cannot be told
    event: Event | None,  # the last of the launches
    is_only_here: bool,  # whether the only launch that has not finished, or else the last rank, ran on this machine
    line_at: float | None,  # when the last line of metrics was written, in seconds since 1970, as `now`
    due_s: float | None,  # seconds between two lines
    timeout_s: float,  # seconds without progress after which a run ends itself
    now: float,
) -> tuple[State, str]:
    """The state of a run that is not done, and the reason for thinking so."""
    line = "no line of metrics yet"
    if line_at is not None:
        due = f", one is due every {duration(due_s)}" if due_s is not None else ""
        line = f"last line {duration(now - line_at)} ago{due}"
    if is_held:
        return "running", line
    if event is not None and (line_at is None or line_at < event.time + _LATER_S):
        ended = f"{event.cause} ({duration(now - event.time)} ago on {event.host})"
        if event.what == "finished":
            if event.exit_code == EXIT_DONE:
                return "stopped", ended
            if event.exit_code == PreemptedError.exit_code:
                return "preempted", ended
            return "failed", f"exit code {event.exit_code}: {ended}"
        if event.what == "restart" and now - event.time < event.pause_s + _TO_START_S:
            return "restarting", ended
        if event.what == "started" and now - event.time < _TO_START_S:
            return "starting", f"launched {duration(now - event.time)} ago on {event.host}"
    is_recent = line_at is not None and now - line_at <= 3 * (due_s or 0.0) + timeout_s
    if is_held is False and is_only_here:
        has_no_end = event is not None and event.what != "finished"
        how = "; the last launch was on this machine and recorded no end" if has_no_end else ""
        return "not running", f"{line}{how}"
    if event is not None and is_recent:
        return "running", f"on {event.host}, by its metrics: {line}"
    if is_recent:
        return "unknown", f"{line}; on this machine no rank holds the directory: it runs on another, or has just ended"
    return "not running", line


def duration(seconds: float) -> str:
    """A duration in its two largest units: 12 s, 5 min, 3 h 12 min, 2 d 4 h."""
    if seconds < 1:
        return f"{max(seconds, 0.0):.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
