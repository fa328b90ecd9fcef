"""Notices that a rank makes no progress, shows the stacks of its threads, and ends it so that it is started again.

A rank in a collective waits silently for the slowest one, until the process group's timeout.
"""

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time

from vitscale.ground.errors import PeerLostError
from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE, Beat
from vitscale.training.deepspeed.distributed import World
from vitscale.training.watching.missing_ranks import INTERVAL_SECONDS, MissingRanks

_AFTER_THE_STACKS_SECONDS = 3.0


class Watchdog(threading.Thread):
    """Ends this process with the code for "repeat" if `at` was not called for `timeout_s`. A context manager.

    Every second it also tells the other ranks and a supervising launch that this rank lives, and where it is.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        super().__init__(name="vitscale-watchdog", daemon=True)
        self._rank, self._timeout, self._missing_ranks = world.rank, timeout_s, MissingRanks(world)
        self._where = (0, "starting", time.monotonic())
        self._ended = threading.Event()
        beat = os.environ.get(HEARTBEAT_VARIABLE)
        self._beat = None if beat is None else int(beat)
        if self._beat is not None:
            os.set_blocking(self._beat, False)  # a launch that does not read must not stop us

    def at(self, step: int, phase: str) -> None:
        """Note progress: `step` updates are done, and `phase` begins."""
        self._where = (step, phase, time.monotonic())

    def who_is_missing(self) -> str:
        """The other ranks that no longer answer, in words. Takes some seconds."""
        return ", ".join(self._missing_ranks.missing()) or "another rank, though all of them still answer"

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        step, phase, since = self._where
        self._tell_the_launch(step, phase, time.monotonic() - since)  # the last beat may be a second old

    def run(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            step, phase, since = self._where
            seconds = time.monotonic() - since
            self._tell_the_launch(step, phase, seconds)
            self._missing_ranks.answer(step, phase)
            if seconds > self._timeout:
                self._end(step, phase, seconds)

    def _tell_the_launch(self, step: int, phase: str, seconds: float) -> None:
        if self._beat is not None:
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(self._beat, Beat(step, phase, seconds).line())

    def _end(self, step: int, phase: str, seconds: float) -> None:
        stacks = _stacks()
        # The other ranks' watchdogs look as well, so this one must keep answering while it looks.
        who: list[str] = []
        looking = threading.Thread(target=lambda: who.append(self.who_is_missing()), daemon=True)
        looking.start()
        while looking.is_alive():
            self._missing_ranks.answer(step, phase)
            looking.join(INTERVAL_SECONDS)
        with contextlib.suppress(OSError):  # a terminal that was closed, a disk that is full
            sys.stderr.write(
                f"error: rank {self._rank} has made no progress for {seconds:,.0f} s (check.step_timeout_s is "
                f"{self._timeout:g}): {phase}, after step {step:,}. It waits for itself, or for {who[0]}. "
                f"Stacks of rank {self._rank}:\n{stacks}"
            )
            sys.stderr.flush()
        time.sleep(_AFTER_THE_STACKS_SECONDS)  # a launcher ends all ranks when one ends: let the others speak too
        os._exit(PeerLostError.exit_code)


def _stacks() -> str:
    """The stacks of all threads, in one piece: ranks write at the same time."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")
    except OSError as error:
        return f"not available: {error.strerror or error}\n"
