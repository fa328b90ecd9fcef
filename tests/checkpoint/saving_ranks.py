"""Ranks joined by gloo alone, without DeepSpeed, of which two save and any number reads."""

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import rank_processes
import torch.distributed as dist
from toy_checkpoint import fragments, holds, index

from vitscale.runs.checkpoint import BackgroundSaver, CheckpointStore, LocalDirectory, RemoteDirectory

SCALE = 400  # 0.3 MB a checkpoint
CUTS = (50, 15_000)


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


class Place(NamedTuple):
    """Where checkpoints are: a folder; or a URL, with a cache and the variables with which its server is found."""

    root: Path | str
    cache: Path | None = None
    environment: dict[str, str] | None = None

    def store(self, this: Rank, world: int) -> CheckpointStore:
        """As seen by one of so many ranks."""
        os.environ.update(self.environment or {})
        directory = RemoteDirectory(self.root, self.cache) if self.cache else LocalDirectory(self.root)
        return CheckpointStore(directory, rank=this.rank, gather=lambda value: this.gather(value, world))


def _saver(this: Rank, place: Place, keep: int) -> BackgroundSaver:
    """The one of a place, the same at each call."""
    key = f"{place.root} {keep}"
    if key not in this.kept:
        this.kept[key] = BackgroundSaver(place.store(this, 2), keep=keep)
    return this.kept[key]


def _save(this: Rank, saver: BackgroundSaver, step: int) -> None:
    saver.save(index(step, SCALE), fragments(step, CUTS, scale=SCALE, rank=this.rank, ranks=2), best=None)


def save_steps(this: Rank, place: Place, steps: list[int], keep: int = 10) -> list[tuple[int, str | None]]:
    """What became of these steps, saved in the background by ranks 0 and 1."""
    if this.rank >= 2:
        return []
    saver = _saver(this, place, keep)
    for step in steps:
        _save(this, saver, step)
    saver.wait()
    return [(outcome.step, outcome.error) for outcome in saver.outcomes()]


def save_until_an_error(this: Rank, place: Place, step: int) -> list[str]:
    """Save steps after this one as fast as can be, and what ended it."""
    saver = _saver(this, place, keep=2)
    while not (errors := [outcome.error for outcome in saver.outcomes() if outcome.error]):
        step += 1
        _save(this, saver, step)
    return errors


def newest(this: Rank, place: Place, world: int) -> tuple[int, bool, list[str]] | None:
    """(step, whether it holds what was saved, what was reported) of the newest checkpoint, read by `world` ranks."""
    if this.rank >= world:
        return None
    said: list[str] = []
    reader = place.store(this, world).newest(said.append)
    assert reader is not None
    found = reader.index.step, holds(reader, reader.index.step, SCALE), said
    this.gather(None, world)  # the copies go with the last reader, and another rank may not have begun to read them
    return found
