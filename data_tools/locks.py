"""Locks that let several converters share one output: each locks its own range of the tasks.

Only a living process holds a lock: the file that a killed one leaves behind locks nothing.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

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
        mine = Fraction(self.index, self.count), Fraction(self.index + 1, self.count)
        theirs = Fraction(other.index, other.count), Fraction(other.index + 1, other.count)
        return mine[0] < theirs[1] and theirs[0] < mine[1]


ALL_TASKS = TaskRange()


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
