"""Starts the ranks of one machine, watches them, passes signals on, and ends all of them when one fails.

It knows processes, exit codes and heartbeats, and nothing of training.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Self

from vitscale.ground.machine import STOPPED, out_of_memory_kills, process_state
from vitscale.ground.safe_text import printable, without_secrets
from vitscale.ground.wording import counted
from vitscale.launch.ends import FINAL, End
from vitscale.launch.rank import RankCommand, RankProcess

# Signals that are passed on -> as what. SIGINT is a person's Ctrl-C, SIGHUP a terminal that was closed.
_PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}
_SAME_REQUEST_SECONDS = 1.0
_LOOK_EVERY_SECONDS = 0.05
_WAS_AWAY_SECONDS = 5.0
_STACKS_SECONDS = 1.0
_DYING_SECONDS = 30.0
_SUSPICIOUS_SECONDS = 5.0

# Reads the numbers of process groups, and kills the groups when the writer has gone.
_GUARD = 'while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups'


def say(message: str) -> None:
    """One line of the supervisor's own. A terminal that is gone is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(2, f"launch: {printable(without_secrets(message))}\n".encode())


class Supervisor:
    """The ranks of one launch, attempt after attempt. A context manager, for the main thread.

    Inside, SIGTERM, SIGINT, SIGHUP and SIGUSR1 to this process go to all ranks; a second one ends all of them.

    Args:
        grace_s: seconds that other ranks have to end by themselves when one has failed.
        silence_s: seconds without a heartbeat after which a rank that has sent some counts as hung. Other ranks have as
            long to end when one has ended well.
    """

    def __init__(self, *, grace_s: float = 20.0, silence_s: float = 60.0) -> None:
        self.told: signal.Signals | None = None  # the first signal that this process got
        self.at_once = False  # whether it got a second one
        self.unkillable = False  # whether a rank of the last attempt is still alive, despite SIGKILL
        self.highest_step = 0  # the highest step of all heartbeats
        self.exchange: Callable[[str], str] = lambda trouble: ""
        """Called again and again with what has gone wrong here, if anything. Returns what has gone wrong elsewhere,
        which counts as a failed rank does.
        """
        self._grace, self._silence = grace_s, silence_s
        self._elsewhere = ""
        self._ranks: list[RankProcess] = []
        self._ends: list[End] = []
        self._hung: dict[int, str] = {}
        self._killed = False
        self._memory_kills: int | None = None
        self._told_at = 0.0
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored on purpose, as by nohup
                self._handlers[number] = signal.signal(number, self._take_note)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else exit codes may be lost
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It only takes note, because what it interrupts may be printing, or starting a rank."""
        del frame
        now = time.monotonic()
        if self.told is None:
            self.told, self._told_at = signal.Signals(number), now
        elif now - self._told_at >= _SAME_REQUEST_SECONDS:
            self.at_once = True

    def run(self, ranks: Sequence[RankCommand]) -> list[End]:
        """Start these ranks and wait until all have ended. Returns their ends, in the order in which they came.

        Nothing is started once this process was told to end. Raises OSError if a rank cannot be started.
        """
        self._ends, self._hung, self._killed, self.unkillable, self._elsewhere = [], {}, False, False, ""
        self._memory_kills = out_of_memory_kills()
        with self._guarded():
            try:
                with _signals_held_back():
                    if self.told is not None:
                        return []
                    for start in ranks:
                        self._ranks.append(RankProcess(start))
                        assert self._guard.stdin is not None
                        with contextlib.suppress(OSError):  # somebody has killed the guard
                            os.write(self._guard.stdin.fileno(), f"{self._ranks[-1].pid}\n".encode())
                self._watch()
            finally:
                if self._running() and not self.unkillable:
                    self._kill()
                self._ranks = []
        return self._ends

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until this process is told to end."""
        until = time.monotonic() + seconds
        while self.told is None and time.monotonic() < until:
            self.exchange("")
            time.sleep(_LOOK_EVERY_SECONDS)

    # ---- Watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        deadline, told, looked_at = math.inf, None, time.monotonic()
        while self._look():
            now = time.monotonic()
            if now - looked_at > _WAS_AWAY_SECONDS:  # this process was stopped itself, the ranks perhaps with it
                for rank in self._running():
                    rank.forgive_silence()
            looked_at = now
            if told is not self.told and self.told is not None:
                told = self.told  # passed on here: another thread may let the handler run between two starts
                for rank in self._running():
                    rank.signal(_PASSED_ON[told])
                say(f"{told.name}: passed on to all ranks; they save and end. A second signal ends them at once")
            if self.at_once:
                say("a second signal: ending all ranks at once")
                return self._kill()
            for rank in self._running():
                if rank.seconds_silent() > self._silence:
                    self._note_left(rank)
            if self._hung:
                return self._kill_with_stacks()
            if self._ends or self._elsewhere:
                has_failed = bool(self._elsewhere) or any(end.is_bad for end in self._ends)
                deadline = min(deadline, now + (self._grace if has_failed else self._silence))
                if now > deadline:
                    return self._kill_with_stacks()
            time.sleep(_LOOK_EVERY_SECONDS)

    def _look(self) -> bool:
        """Note which ranks have ended and what has gone wrong elsewhere. Returns whether any rank is left."""
        for rank in self._running():
            if rank.look():
                self._note_end(rank)
            self.highest_step = max(self.highest_step, rank.highest_step)
        if os.getpid() == 1:
            self._reap_orphans()
        hung = next((f"rank {rank} {how}" for rank, how in self._hung.items()), "")
        elsewhere = self.exchange(next((end.describe() for end in self._ends if end.is_bad), hung))
        if elsewhere and not self._elsewhere and self._running():
            say(f"{elsewhere}; the ranks here have {self._grace:.0f} s to end by themselves")
        self._elsewhere = self._elsewhere or elsewhere
        return bool(self._running())

    def _reap_orphans(self) -> None:
        """Reap what ranks leave behind: as the first process of a container, this one inherits it."""
        own = {self._guard.pid, *(rank.pid for rank in self._running())}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.returncode is None]

    def _note_end(self, rank: RankProcess) -> None:
        assert rank.returncode is not None
        was_killed = self._killed and rank.returncode in (-signal.SIGKILL, -signal.SIGUSR2)
        end = End(
            rank.rank,
            rank.pid,
            rank.returncode,
            rank.step,
            rank.where(),
            was_told=self.told is not None and rank.returncode == -_PASSED_ON[self.told],
            was_killed=was_killed,
            hung=self._hung.get(rank.rank, ""),
            why=rank.why,
        )
        self._ends.append(end)
        if end.is_bad and not was_killed and not end.hung and end.returncode not in FINAL:  # it has said why itself
            hint = _out_of_memory_hint(self._memory_kills) if rank.returncode == -signal.SIGKILL else ""
            say(f"{end.describe()}, on {socket.gethostname()}{hint}")

    def _note_left(self, rank: RankProcess) -> None:
        """Say what is known about a rank that has to be killed."""
        silent, state = rank.seconds_silent(), process_state(rank.pid)
        is_silent = silent > min(_SUSPICIOUS_SECONDS, self._silence)
        what = f"gave no sign of life for {silent:.0f} s" if is_silent else "did not end by itself"
        how = f"{what} (its process: {state})"
        if is_silent or state == STOPPED:
            self._hung[rank.rank] = how
        say(f"rank {rank.rank} (pid {rank.pid}) {how} {rank.where()}")

    # ---- Ending ------------------------------------------------------------------------------------------------------

    def _kill_with_stacks(self) -> None:
        """Have the ranks dump their threads' stacks on SIGUSR2 (stopped ones are continued for it), then kill them."""
        self._killed = True
        for rank in self._running():
            if rank.rank not in self._hung:
                self._note_left(rank)
            rank.signal(signal.SIGUSR2)
            rank.signal(signal.SIGCONT)
        self._look_for(_STACKS_SECONDS)
        self._kill()

    def _kill(self) -> None:
        self._killed = True
        for rank in self._running():
            rank.kill()
        self._look_for(_DYING_SECONDS)
        for rank in self._running():
            self.unkillable = True
            say(f"rank {rank.rank} (pid {rank.pid}) does not die of SIGKILL (its process: {process_state(rank.pid)})")

    def _look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._look() and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_SECONDS)

    # ---- When this process is killed ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Keep a process that outlives this one and kills what ranks have started; the ranks die with this one."""
        with _signals_held_back():  # which it inherits: only the end of its input ends it
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        try:
            yield
        finally:
            self._guard.kill()
            self._guard.wait()
            assert self._guard.stdin is not None
            self._guard.stdin.close()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _out_of_memory_hint(before: int | None) -> str:
    now = out_of_memory_kills()
    if now is None or before is None:
        return "; perhaps out of memory: see the kernel's log"
    if now > before:
        return f"; out of memory: the kernel killed {counted(now - before, 'process')} of this control group for it"
    return "; not out of memory, by the counters of this control group"
