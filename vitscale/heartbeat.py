"""Heartbeats: what a rank tells the launch that supervises it, one JSON object a line through a pipe."""

import json
from typing import NamedTuple, Self

HEARTBEAT_VARIABLE = "VITSCALE_HEARTBEAT_FD"
"""The number of an open file that a supervising launch reads: one JSON object with step, phase and phase_s a line."""


class Beat(NamedTuple):
    """Updates done, and the phase in which the rank has been for `phase_s` seconds."""

    step: int
    phase: str
    phase_s: float

    def line(self) -> bytes:
        """What goes through the pipe."""
        content = {"step": self.step, "phase": self.phase, "phase_s": round(self.phase_s, 1)}
        return (json.dumps(content) + "\n").encode()

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """The beat that a line is, or None."""
        try:
            found = json.loads(line)
            return cls(int(found["step"]), str(found["phase"]), float(found.get("phase_s", 0.0)))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
