"""Run tasks in worker processes of this machine: none that dies or stalls goes unnoticed, none outlives the conversion.

A task whose worker died is tried again in a fresh one. An image that two workers died on is rejected; what cannot be
blamed on an image ends the conversion after three tries, and so does a task with three such images.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from data_tools.tasks import Progress, Task, Tick
from vitscale.ground.errors import DataError, VitscaleError

STALL_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0
_DEATHS_OF_AN_IMAGE = 2
_DEATHS_IN_ONE_PLACE = 3
_DEATHS_OF_A_TASK = 6
_NO_IMAGE = -1  # the worker had not started on an image
_PR_SET_PDEATHSIG = 1


@dataclass
class _Attempt:
    """A task and the deaths of its workers, counted by the image that each was working on."""

    task: Task
    deaths: Counter[int] = field(default_factory=Counter)


@dataclass
class _Worker:
    """One process, its current task, and its counters in shared memory: images done, images rejected, signs of life.

    No lock guards the counters, so a killed worker cannot leave one locked.
    """

    process: BaseProcess
    connection: Connection
    counts: Any
    is_ready: bool = False
    attempt: _Attempt | None = None
    seen: tuple[int, int] = (0, 0)
    since: float = 0.0


class _Progress(Progress):
    """The worker's access to the counters."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    def advance(self, rejected: bool = False) -> None:
        self._counts[0] += 1
        self._counts[1] += rejected

    def alive(self) -> None:
        self._counts[2] += 1


def run_in_processes(
    tasks: Iterable[Task], workers: int, tick: Tick, stall_seconds: float = STALL_SECONDS
) -> Iterator[Any]:
    """Run tasks in `workers` processes, yielding what they return as it comes, calling `tick` several times a second.

    Tasks are taken from `tasks` as workers become free. A worker stuck on one image for `stall_seconds` is killed.

    Raises:
        VitscaleError: what a task raised.
        DataError: a task whose workers die repeatedly.
        RuntimeError: a bug in a task, with the worker's trace.
    """
    context = multiprocessing.get_context("spawn")  # forking a process that has threads is unsafe
    pending = map(_Attempt, tasks)
    again: list[_Attempt] = []
    pool: list[_Worker] = []
    done = rejected = 0
    try:
        while True:
            while len(pool) < workers or any(worker.attempt is None for worker in pool):
                attempt = again.pop() if again else next(pending, None)
                if attempt is None:
                    break
                idle = next((worker for worker in pool if worker.attempt is None), None)
                if idle is None:
                    idle = _start(context)
                    pool.append(idle)
                _give(idle, attempt)
            busy = [worker for worker in pool if worker.attempt is not None]
            if not busy:
                return
            ready = wait([worker.connection for worker in busy], _POLL_SECONDS)
            for worker in busy:
                how = None
                if worker.connection in ready:
                    outcome, how = _receive(worker)
                    if how is None and not worker.is_ready:
                        worker.is_ready = True
                        _send(worker)
                    elif how is None:
                        done, rejected = done + worker.counts[0], rejected + worker.counts[1]
                        worker.attempt = None
                        yield outcome
                elif _stalls(worker, stall_seconds):
                    worker.process.kill()
                    how = f"without progress for {stall_seconds:,.0f} s"
                if how is not None:
                    pool.remove(worker)
                    again.append(_after_death(worker, how))
            running = [worker.counts for worker in pool if worker.attempt is not None]
            tick(done + sum(max(0, counts[0]) for counts in running), rejected + sum(counts[1] for counts in running))
    finally:
        _end(pool)


def _start(context: Any) -> _Worker:
    ours, theirs = context.Pipe()
    counts = context.RawArray("q", 3)
    process = context.Process(target=_work, args=(theirs, counts, os.getpid()), daemon=True)
    with _interrupt_held_back(), _without_callers_script():
        process.start()
    theirs.close()
    return _Worker(process, ours, counts)


@contextmanager
def _without_callers_script() -> Iterator[None]:
    """Keeps a worker from running the script that calls `convert` once more, from its first line."""
    main = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update({"__spec__": None} | hidden)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Delays Ctrl-C until the end: a child interrupted while starting would print a traceback.

    The child inherits the blocked signal until it can ignore it. Only this thread blocks it: another one may take the
    signal, and Python would still raise it here.
    """
    is_main = threading.current_thread() is threading.main_thread()
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number)) if is_main else None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if is_main:
            signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


def _give(worker: _Worker, attempt: _Attempt) -> None:
    worker.attempt, worker.since = attempt, time.monotonic()
    worker.counts[0], worker.counts[1] = _NO_IMAGE, 0
    if worker.is_ready:
        _send(worker)


def _send(worker: _Worker) -> None:
    """Send the task; only to a worker that is listening, because a task is larger than a pipe's buffer."""
    assert worker.attempt is not None
    with suppress(OSError):  # the worker has died; waiting for its answer tells how
        worker.connection.send(worker.attempt.task)


def _receive(worker: _Worker) -> tuple[Any, str | None]:
    """A task's result, or how its worker died. Raises what the task raised."""
    try:
        outcome = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(_END_SECONDS)
        code = worker.process.exitcode
        if code is None or code >= 0:
            return None, f"exit code {code}"
        hint = " (is the memory exhausted?)" if code == -signal.SIGKILL else ""
        return None, f"killed by {signal.Signals(-code).name}{hint}"
    if isinstance(outcome, VitscaleError):
        raise outcome
    if isinstance(outcome, _Bug):
        assert worker.attempt is not None
        raise RuntimeError(f"{worker.attempt.task.name}: a bug in a worker:\n{outcome.trace}")
    return outcome, None


def _stalls(worker: _Worker, stall_seconds: float) -> bool:
    now, at = time.monotonic(), (worker.counts[0], worker.counts[2])
    if at != worker.seen:
        worker.seen, worker.since = at, now
    return now - worker.since > stall_seconds


def _after_death(worker: _Worker, how: str) -> _Attempt:
    """The task to run again, without the image if that is to blame. Raises DataError after too many deaths."""
    attempt = worker.attempt
    assert attempt is not None
    worker.connection.close()
    position = worker.counts[0]
    attempt.deaths[position] += 1
    total = attempt.deaths.total()
    if attempt.deaths[position] >= _DEATHS_IN_ONE_PLACE or total >= _DEATHS_OF_A_TASK:
        at = "before its first image" if position == _NO_IMAGE else f"at {attempt.task.describe(position)}"
        raise DataError(
            f"{attempt.task.name}: {total} workers died on it, the last {at}, {how}. What is done so far is kept: fix "
            "the cause and repeat the command"
        )
    if position != _NO_IMAGE and attempt.deaths[position] >= _DEATHS_OF_AN_IMAGE:
        reason = f"{_DEATHS_OF_AN_IMAGE} workers died on it, the last {how}"
        rest = attempt.task.without(position, reason)
        if rest is not None:
            return _Attempt(rest, attempt.deaths)
    return attempt


def _end(pool: list[_Worker]) -> None:
    for worker in pool:
        worker.connection.close()  # a worker waiting for a task exits on this
        if worker.attempt is not None:
            worker.process.terminate()
    for worker in pool:
        worker.process.join(_END_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()


@dataclass(frozen=True)
class _Bug:
    trace: str


def _work(connection: Connection, counts: Any, parent: int) -> None:
    """The worker: tasks in, results out, until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with(parent)
    with suppress(OSError):
        connection.send(None)  # ready
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        outcome: Any
        counts[0] = 0
        try:
            outcome = task.run(_Progress(counts))
        except VitscaleError as error:
            outcome = error
        except Exception:
            outcome = _Bug(traceback.format_exc())
        try:
            connection.send(outcome)
        except OSError:
            return


def _die_with(parent: int) -> None:
    """Die with the converter: by then its successor may be writing to the same places."""
    with suppress(OSError, AttributeError):  # not Linux: anything written twice is equal anyway
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
