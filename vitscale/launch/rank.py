"""One rank as a process: how it is started, what its heartbeats say, how it ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE, Beat, why_of

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # looked up here: the less is done between fork and exec the better


class RankCommand(NamedTuple):
    """What to start as one rank, and what to add to the environment for it."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]


class RankProcess:
    """A rank from its start to its end.

    It is a session of its own: a terminal's signals reach the supervisor alone, and whatever the rank starts can be
    ended with it. It dies with the supervisor's main thread, which must therefore be the one that starts it.
    Raises OSError if it cannot be started.
    """

    def __init__(self, start: RankCommand) -> None:
        self.rank = start.rank
        self.step: int | None = None  # of the last heartbeat
        self.highest_step = 0
        self.returncode: int | None = None  # as subprocess has it: negative for a signal
        self.why = ""  # the error that it ended with, if it has told
        self._phase = ""
        self._heard_at: float | None = None
        self._partial = b""
        self._beats, writing = os.pipe()
        try:
            for end in (self._beats, writing):
                os.set_blocking(end, False)  # neither side ever waits for the other
            self._process = subprocess.Popen(
                start.command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **start.environment, HEARTBEAT_VARIABLE: str(writing)},
                pass_fds=(writing,),
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        except BaseException:
            os.close(self._beats)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone, not to what it has started."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and all that it has started, as far as that has stayed in the rank's process group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def look(self) -> bool:
        """Read the heartbeats. Returns whether the rank has ended; if so, what it has started is killed."""
        if self.returncode is not None:
            return True
        has_ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        self._read_beats()
        if has_ended:
            self.kill()  # before its number is free for another process
            self.returncode = self._process.wait()
            os.close(self._beats)
        return has_ended

    def seconds_silent(self) -> float:
        """Seconds since the last heartbeat; 0 if there was none yet."""
        return 0.0 if self._heard_at is None else time.monotonic() - self._heard_at

    def forgive_silence(self) -> None:
        """Count the silence from now on."""
        if self._heard_at is not None:
            self._heard_at = time.monotonic()

    def where(self) -> str:
        """Where in training it is, in words, as far as the heartbeats tell."""
        return "before its first heartbeat" if self.step is None else f"after step {self.step:,} ({self._phase})"

    def _read_beats(self) -> None:
        try:
            received = os.read(self._beats, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + received).split(b"\n")
        for line in lines:
            beat = Beat.parse(line)
            if beat is None:
                self.why = why_of(line) or self.why
                continue
            self.step, self._phase, _ = beat
            self.highest_step = max(self.highest_step, self.step)
            self._heard_at = time.monotonic()


def die_with(parent: int) -> Callable[[], None]:
    """What a new process does between fork and exec, so that no rank outlives its supervisor, however that ends."""

    def bind() -> None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # ranks are started while signals are held back

    return bind
