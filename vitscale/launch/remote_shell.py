"""The far end of an ssh connection: runs one command there, for as long as the connection lives.

It reads lines of JSON from its input: first what to run, then a sign of life every few seconds, and signals to pass on.
When the input ends or falls silent, the command and all that it has started are killed: nothing is left behind.
"""

import json
import os
import select
import signal
import time
from typing import Any

from vitscale.launch.ends import EXIT_RETRY
from vitscale.launch.rank import RankCommand, RankProcess
from vitscale.launch.supervisor import say

SILENCE_SECONDS = 30.0
"""Seconds without a line after which the other end counts as gone."""

_LOOK_EVERY_SECONDS = 0.05


def main() -> None:
    """Entry point: ends with the command's exit code, or with 75 if the command was killed."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # not ignored: the command would inherit that
        signal.signal(number, lambda *_: None)  # only the connection ends it
    lines = _Lines()
    while not (received := lines.read(1.0)):
        if lines.has_ended:
            os._exit(EXIT_RETRY)
    start, *received = received
    os.chdir(start["folder"])
    process = RankProcess(RankCommand(0, start["command"], start["environment"]))
    while not process.look():
        for line in received:
            if "signal" in line:
                process.signal(signal.Signals[line["signal"]])
        if lines.has_ended:
            say(f"{lines.has_ended}: ending all ranks on this host")
            process.signal(signal.SIGKILL)  # its ranks die with it
            lines.has_ended = ""
        received = lines.read(_LOOK_EVERY_SECONDS)
    code = process.returncode
    os._exit(EXIT_RETRY if code is None or code < 0 else code)


class _Lines:
    """The lines of JSON that come over the connection."""

    def __init__(self) -> None:
        self.has_ended = ""
        self._is_open = True
        self._partial = b""
        self._heard_at = time.monotonic()

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """The lines that have come, after `seconds` at the latest."""
        if not self._is_open:
            time.sleep(seconds)
            return []
        if select.select([0], [], [], seconds)[0]:
            received = os.read(0, 1 << 16)
            self._heard_at = time.monotonic()
            if not received:
                self._is_open, self.has_ended = False, "the connection to the front has ended"
            *lines, self._partial = (self._partial + received).split(b"\n")
            return [json.loads(line) for line in lines]
        silent = time.monotonic() - self._heard_at
        if silent > SILENCE_SECONDS:
            self._is_open, self.has_ended = False, f"the front has said nothing for {silent:.0f} s"
        return []


if __name__ == "__main__":
    main()
