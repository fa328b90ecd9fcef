"""Ranks in processes of their own, which meet once and then do together what is asked for, one thing after another."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from torch.multiprocessing import start_processes

# What a process has imported of which every rank is a copy. The second is what the first expected memory of a process
# imports, with the fake tensors that it is counted by.
multiprocessing.set_forkserver_preload(["vitscale.training.loop.trainer", "torch._dynamo", "s3fs"])
_CONTEXT = multiprocessing.get_context("forkserver")


class Ranks:
    """A world of so many processes. A context manager, which kills them; they do not outlive the tests either.

    `join(rank, size, *arguments)` is called by each of them first; what it returns is the first argument of all that
    they are asked to do.
    """

    def __init__(self, size: int, join: Callable[..., Any], *arguments: Any, patience_s: float | None = None) -> None:
        self._patience_s = patience_s
        pipes = [_CONTEXT.Pipe() for _ in range(size)]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(there, join, rank, size, *arguments), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        self._pipes = [here for here, _ in pipes]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have every rank call a function of a module."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self) -> list[Any]:
        """What it returned on each rank. The first error of any is one here. It or a limit of time kills all."""
        try:
            return self._results()
        except BaseException:
            self.close()
            raise

    def _results(self) -> list[Any]:
        found: dict[Connection, Any] = {}
        while len(found) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in found], self._patience_s)
            assert ready, f"{len(self._pipes) - len(found)} of {len(self._pipes)} ranks hang"
            for pipe in ready:
                try:
                    found[pipe] = pipe.recv()
                except EOFError:
                    found[pipe] = RuntimeError(f"rank {self._pipes.index(pipe)} has died")
                if isinstance(found[pipe], Exception):
                    raise found[pipe]
        return [found[pipe] for pipe in self._pipes]

    def do(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`start`, and the `results`."""
        self.start(function, *arguments)
        return self.results()

    def answer(self, rank: int) -> Any:
        """The result of one rank alone, an error included."""
        assert self._pipes[rank].poll(self._patience_s), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def kill(self, rank: int) -> None:
        """kill -9."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join()

    def close(self) -> None:
        """Kill all of them."""
        for process in self.processes:
            process.kill()
            process.join()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_once(
    entry: Callable[..., None], arguments: tuple[Any, ...], size: int, method: Literal["spawn", "forkserver"] = "spawn"
) -> None:
    """`entry(rank, *arguments)` in so many processes, which do not outlive this call, as a limit of time may end it."""
    context = start_processes(entry, arguments, nprocs=size, join=False, start_method=method)
    assert context is not None
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()


def _serve(pipe: Connection, join: Callable[..., Any], rank: int, size: int, *arguments: Any) -> None:
    this = join(rank, size, *arguments)
    while True:
        try:
            function, given = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = function(this, *given)
        except Exception:
            result = RuntimeError(f"rank {rank}: {traceback.format_exc()}")
        pipe.send(result)
