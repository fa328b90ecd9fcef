"""Ranks joined by gloo alone, without DeepSpeed."""

import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import rank_processes
import torch.distributed as dist


class Rank:
    """What the function of a test gets: who it is, and `gather` over all ranks, or over those below `limit`."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        # What is too long for a file is an error of the call, as for a disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = dist.FileStore(meeting, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        self.rank, self.size = rank, size
        self._groups = {limit: dist.new_group(range(limit)) for limit in range(1, size + 1)}
        self.kept: dict[str, Any] = {}  # from one function to the next

    def gather(self, value: object, limit: int | None = None) -> list:
        values: list = [None] * (limit or self.size)
        dist.all_gather_object(values, value, self._groups[limit or self.size])
        return values


class Ranks(rank_processes.Ranks):
    """A world of so many of them."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(size, Rank, str(Path(self._folder.name) / "meeting"), patience_s=120)

    def close(self) -> None:
        """Kill all of them."""
        super().close()
        self._folder.cleanup()
