"""Notices that a rank makes no progress, names the rank that is missing, and ends this one so that it starts again.

A rank in a collective waits silently for the slowest one, until the process group's timeout. So every rank leaves a
message at the rendezvous every second. To find missing ranks, one looks twice: a rank whose message has not changed in
between has ended, was stopped or is cut off.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vitscale.ground.errors import PeerLostError
from vitscale.ground.heartbeat import HEARTBEAT_VARIABLE, Beat
from vitscale.training.deepspeed.distributed import World

_INTERVAL_SECONDS = 1.0
_AFTER_THE_STACKS_SECONDS = 3.0
_LOOK_SECONDS = 4.0
_STORE_SECONDS = 10.0
_JOIN_SECONDS = 0.1
_ONLY_ZERO = "rank 0, or the machine that it runs on"
_KEY = "vitscale/present/{}"


class Watchdog(threading.Thread):
    """Ends this process with the code for "repeat" if `at` was not called for `timeout_s`. A context manager.

    Every second it also tells the other ranks and a supervising launch that this rank lives, and where it is.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        super().__init__(name="vitscale-watchdog", daemon=True)
        self._world, self._timeout = world, timeout_s
        self._messages_left, self._host, self._store, self._is_cut_off = 0, socket.gethostname(), _connect(), False
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
        """The other ranks that no longer answer, in words. Takes some seconds.

        Another thread should keep answering meanwhile: it notices at once if rank 0 has ended.
        """
        looking, results = _in_a_thread(self._look)  # the connection to a machine that is gone may take minutes to fail
        until = time.monotonic() + _LOOK_SECONDS + _STORE_SECONDS
        while looking.is_alive() and time.monotonic() < until and not self._is_cut_off:
            looking.join(_JOIN_SECONDS)
        # Failing to reach the rendezvous is no error: it means that rank 0, which holds it, is gone.
        missing = results[0] if results else [_ONLY_ZERO]
        return ", ".join(missing) or "another rank, though all of them still answer"

    def _look(self) -> list[str]:
        try:
            store = _connect()
            before = self._messages(store)
            time.sleep(_LOOK_SECONDS)
            after = self._messages(store)
        except RuntimeError:
            return [_ONLY_ZERO]
        unchanged = {rank: message for rank, message in after.items() if message == before[rank]}
        return [_describe(rank, message) for rank, message in unchanged.items() if rank != self._world.rank]

    def _messages(self, store: dist.TCPStore) -> dict[int, str | None]:
        keys = {rank: _KEY.format(rank) for rank in range(self._world.size)}
        return {rank: store.get(key).decode() if store.check([key]) else None for rank, key in keys.items()}

    def _answer(self, step: int, phase: str) -> None:
        """Leave a message for the other ranks. Raises nothing."""
        if self._is_cut_off:
            return  # a connection that was closed never comes back, and torch prints a trace for each attempt
        self._messages_left += 1
        try:
            self._store.set(_KEY.format(self._world.rank), f"{self._messages_left}|{self._host}|{step}|{phase}")
        except RuntimeError:
            self._is_cut_off = True

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        step, phase, since = self._where
        self._tell_the_launch(step, phase, time.monotonic() - since)  # the last beat may be a second old

    def run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            step, phase, since = self._where
            seconds = time.monotonic() - since
            self._tell_the_launch(step, phase, seconds)
            self._answer(step, phase)
            if seconds > self._timeout:
                self._end(step, phase, seconds)

    def _tell_the_launch(self, step: int, phase: str, seconds: float) -> None:
        if self._beat is not None:
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(self._beat, Beat(step, phase, seconds).line())

    def _end(self, step: int, phase: str, seconds: float) -> None:
        stacks = _stacks()
        # The other ranks' watchdogs look as well, so this one must keep answering while it looks.
        looking, who = _in_a_thread(self.who_is_missing)
        while looking.is_alive():
            self._answer(step, phase)
            looking.join(_INTERVAL_SECONDS)
        with contextlib.suppress(OSError):  # a terminal that was closed, a disk that is full
            sys.stderr.write(
                f"error: rank {self._world.rank} has made no progress for {seconds:,.0f} s (check.step_timeout_s is "
                f"{self._timeout:g}): {phase}, after step {step:,}. It waits for itself, or for {who[0]}. "
                f"Stacks of rank {self._world.rank}:\n{stacks}"
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


def _in_a_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that was started, and a list to which it adds its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def _describe(rank: int, message: str | None) -> str:
    if message is None:
        return f"rank {rank}"
    _, host, step, phase = message.split("|", 3)
    return f"rank {rank} on {host} (step {int(step):,}, {phase})"


def _connect() -> dist.TCPStore:
    """A connection for one caller: waiting for an answer blocks the connection that was asked."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
