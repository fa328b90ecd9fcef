"""How a conversion is run: its processes, its share of the tasks, and the locks of converters that share an output.

Each converter locks its own range of the tasks. Only a living process holds a lock: the file that a killed one leaves
behind locks nothing.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_tools.tasks import Run, run_inline
from data_tools.worker_processes import run_in_processes
from vitscale.ground.errors import RecipeError
from vitscale.ground.files.locks import LockFile, lock, locked, noted, try_lock

_RANGE = re.compile(r"(\d+)/(\d+)")
_LOCK = re.compile(r"tasks-(\d+)-of-([1-9]\d*)\.lock")


@dataclass(frozen=True)
class TaskRange:
    """Piece `index` of `count` equal pieces of all tasks."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "TaskRange":
        """Parses `i/n`, with i from 0 to n-1. Raises RecipeError."""
        match = _RANGE.fullmatch(text)
        if match is None or not 0 <= int(match[1]) < int(match[2]):
            raise RecipeError(f"--task-range {text}: expected i/n with i from 0 to n-1, such as 0/8 ... 7/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, tasks: int) -> range:
        """The numbers of this piece's tasks, out of `tasks` in all."""
        return range(self.index * tasks // self.count, (self.index + 1) * tasks // self.count)

    def overlaps(self, other: "TaskRange") -> bool:
        # Whether each begins before the other ends: i/n < (j+1)/m and j/m < (i+1)/n.
        return (
            self.index * other.count < (other.index + 1) * self.count
            and other.index * self.count < (self.index + 1) * other.count
        )


ALL_TASKS = TaskRange()


@dataclass(frozen=True)
class Machine:
    """How a conversion is run; none of this changes what is written."""

    workers: int | None = None  # number of processes; None for one per core
    tasks: TaskRange = ALL_TASKS  # the share of the tasks that is done here
    work: Path | None = None  # local folder for files that only this machine needs; None for the output's own
    max_reject_rate: float = 0.01  # largest allowed share of images that cannot be stored, 0 to 1
    allow_unlabelled: bool = False  # whether more than 1 % of the images may lack a label although others have one

    @property
    def processes(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def runner(self, *places: str) -> Run:
        """What runs tasks that use these paths and URLs."""
        if any(place.startswith("memory://") for place in places):  # other processes cannot see this memory
            return run_inline
        return lambda tasks, tick: run_in_processes(tasks, self.processes, tick)


@contextmanager
def claimed(folder: Path, tasks: TaskRange) -> Iterator[None]:
    """Lock a range of tasks against all other converters that use the lock folder `folder`.

    Raises RecipeError if another converter is working on some of them; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"tasks-{tasks.index}-of-{tasks.count}.lock"
    with locked(folder / "gate"):
        for path in folder.iterdir():
            if found := _LOCK.fullmatch(path.name):
                other = TaskRange(int(found[1]), int(found[2]))
                if other.overlaps(tasks):
                    _refuse_living(path, other)
        held = LockFile(mine)
        lock(held)
        held.note(f"process {os.getpid()} on {platform.node()}")
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)
        held.close()


def _refuse_living(path: Path, other: TaskRange) -> None:
    """Raise RecipeError if `path`, the lock of the range `other`, is held; remove the file if it is not."""
    try:
        file = LockFile(path, create=False)
    except FileNotFoundError:  # its holder has just finished
        return
    with file:
        if not try_lock(file):
            what = "all tasks" if other.count == 1 else f"tasks {other}"
            raise RecipeError(
                f"OUT: another vitscale-convert ({noted(file) or 'just starting'}) is working on {what} there. Several "
                "may share an output if their --task-range i/n do not overlap"
            )
        path.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Lock for work that one converter does at a time; the others call `waits`, then wait. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with LockFile(folder / "planning") as file:
        if not try_lock(file):
            waits()
            lock(file)
        yield
