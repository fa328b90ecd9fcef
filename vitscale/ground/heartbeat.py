"""Heartbeats: a rank's progress reports to the launch that supervises it, one JSON object per line through a pipe."""

import contextlib
import json
import os
from typing import NamedTuple, Self

HEARTBEAT_VARIABLE = "VITSCALE_HEARTBEAT_FD"
"""The environment variable with the pipe's file descriptor; each line has step, phase and phase_s, or why."""

_MOST_CHARACTERS = 500  # escaped, a pipe still takes the line as a whole


class Beat(NamedTuple):
    """The number of updates done, the phase the rank is in, and for how many seconds it has been in it."""

    step: int
    phase: str
    phase_s: float

    def line(self) -> bytes:
        """The beat as a line for the pipe."""
        content = {"step": self.step, "phase": self.phase, "phase_s": round(self.phase_s, 1)}
        return (json.dumps(content) + "\n").encode()

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """The beat that a line contains; None if the line is not a beat."""
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found = json.loads(line)
            return cls(int(found["step"]), str(found["phase"]), float(found.get("phase_s", 0.0)))
        return None


def tell_launch_why(message: str) -> None:
    """Tell the launch, if there is one, the message of the error that this rank ends with."""
    with contextlib.suppress(KeyError, ValueError, OSError):  # no launch, or it has gone
        line = json.dumps({"why": message[:_MOST_CHARACTERS]}) + "\n"
        os.write(int(os.environ[HEARTBEAT_VARIABLE]), line.encode())


def why_of(line: bytes) -> str:
    """The message of `tell_launch_why` that a line contains; "" if it contains none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(found.get("why", "")) if isinstance(found, dict) else ""
