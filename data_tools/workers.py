"""Run shard tasks in worker processes of this machine: none that dies goes unnoticed, none outlives the conversion."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from data_tools.shard_task import ShardReport, ShardTask, convert_shard
from vitscale.errors import DataError, VitscaleError

_POLL_SECONDS = 0.1
_END_SECONDS = 5.0

Tick = Callable[[int, int], None]  # images done, images rejected


class _Counter:
    """A task's own two numbers in shared memory: no lock, so a killed worker cannot leave one locked."""

    def __init__(self, counts: Any, index: int, parent: int) -> None:
        self._counts, self._at, self._parent = counts, 2 * index, parent

    def advance(self, rejected: bool) -> None:
        if os.getppid() != self._parent:  # killed; its successor may be writing to the same directory by now
            os._exit(1)
        self._counts[self._at] += 1
        self._counts[self._at + 1] += rejected


def run_tasks(tasks: Sequence[ShardTask], workers: int, tick: Tick) -> Iterator[ShardReport]:
    """Convert shards in `workers` processes, yielding reports as they come, calling `tick` several times a second.

    Raises:
        DataError: what a task raised, or a worker that died.
        RuntimeError: a bug in a task, with the worker's trace.
    """
    context = multiprocessing.get_context("spawn")  # forking a process that has threads is unsafe
    counts = context.RawArray("q", 2 * len(tasks))
    pending = list(range(len(tasks)))[::-1]
    processes: dict[Connection, BaseProcess] = {}
    assigned: dict[Connection, int] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(theirs, counts), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
            _assign(ours, pending, assigned, tasks)
        while assigned:
            for ready in wait(list(assigned), _POLL_SECONDS):
                assert isinstance(ready, Connection)
                yield _receive(ready, processes[ready], tasks[assigned.pop(ready)])
                if pending:
                    _assign(ready, pending, assigned, tasks)
            tick(sum(counts[0::2]), sum(counts[1::2]))
    finally:
        for connection, worker in processes.items():
            connection.close()  # a worker that waits for a task ends on this
            if assigned:
                worker.terminate()
        for worker in processes.values():
            worker.join(_END_SECONDS)
            if worker.is_alive():
                worker.kill()


def _assign(to: Connection, pending: list[int], assigned: dict[Connection, int], tasks: Sequence[ShardTask]) -> None:
    number = pending.pop()
    assigned[to] = number
    with suppress(OSError):  # it has died; waiting for its answer says how
        to.send((number, tasks[number]))


def _receive(connection: Connection, process: BaseProcess, task: ShardTask) -> ShardReport:
    try:
        outcome = connection.recv()
    except (EOFError, OSError):
        process.join(_END_SECONDS)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        hint = "; was the memory exhausted?" if code == -signal.SIGKILL else ""
        raise DataError(
            f"a worker died while it wrote shard {task.index} ({how}{hint}). No manifest was written"
        ) from None
    if isinstance(outcome, VitscaleError):
        raise outcome
    if isinstance(outcome, str):
        raise RuntimeError(f"shard {task.index}: a bug in a worker:\n{outcome}")
    return outcome


def _work(connection: Connection, counts: Any) -> None:
    """The worker: tasks in, reports out, until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    parent = os.getppid()
    while True:
        try:
            number, task = connection.recv()
        except (EOFError, OSError):
            return
        outcome: ShardReport | VitscaleError | str
        try:
            outcome = convert_shard(task, _Counter(counts, number, parent))
        except VitscaleError as error:
            outcome = error
        except Exception:
            outcome = traceback.format_exc()
        try:
            connection.send(outcome)
        except OSError:
            return
