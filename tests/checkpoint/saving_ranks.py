"""Ranks in processes of their own, joined by gloo, that do together what a test asks for."""

import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

# A process that has imported torch once, of which each rank is a copy.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "vitscale.runs.checkpoint", "s3fs"])


class Rank:
    """What the function of a test gets: who it is, and `gather` over all ranks, or over those below `limit`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._groups = {limit: dist.new_group(range(limit)) for limit in range(1, size + 1)}
        self.kept: dict[str, Any] = {}  # from one function to the next

    def gather(self, value: object, limit: int | None = None) -> list:
        values: list = [None] * (limit or self.size)
        dist.all_gather_object(values, value, self._groups[limit or self.size])
        return values


class Ranks:
    """A world of so many processes. A context manager, which kills them."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        pipes = [_CONTEXT.Pipe() for _ in range(size)]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(rank, size, meeting, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        self._pipes = [here for here, _ in pipes]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have every rank call a function of a module: `function(rank, *arguments)`."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self) -> list[Any]:
        """What it returned on each rank. An error on any of them is one here."""
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(120), f"rank {rank} hangs"
            found.append(pipe.recv())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def do(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`start`, and the `results`."""
        self.start(function, *arguments)
        return self.results()

    def answer(self, rank: int) -> Any:
        """The result of one rank alone, an error included."""
        assert self._pipes[rank].poll(120), f"rank {rank} hangs"
        return self._pipes[rank].recv()

    def kill(self, rank: int) -> None:
        """kill -9."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # what is too long for a file is an error of the call, as for a disk
    store = dist.FileStore(meeting, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    this = Rank(rank, size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = function(this, *arguments)
        except Exception as error:
            result = RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
        pipe.send(result)
