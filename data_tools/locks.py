"""Several converters on one output: each has a range of the tasks to itself, and says so by a lock.

A lock is held by a living process and by nothing else: one that was killed leaves a file that locks nothing.
"""

import fcntl
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TextIO

from vitscale.errors import RecipeError

_RANGE = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class TaskRange:
    """Piece `index` of `count` equal pieces of all tasks."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "TaskRange":
        """From i/n, with i from 0 to n-1. Raises RecipeError."""
        match = _RANGE.fullmatch(text)
        if match is None or not 0 <= int(match[1]) < int(match[2]):
            raise RecipeError(f"--task-range {text}: expected i/n with i from 0 to n-1, such as 0/8 ... 7/8")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, tasks: int) -> range:
        """The numbers of the tasks that belong to this piece."""
        return range(self.index * tasks // self.count, (self.index + 1) * tasks // self.count)

    def overlaps(self, other: "TaskRange") -> bool:
        mine = Fraction(self.index, self.count), Fraction(self.index + 1, self.count)
        theirs = Fraction(other.index, other.count), Fraction(other.index + 1, other.count)
        return mine[0] < theirs[1] and theirs[0] < mine[1]


ALL_TASKS = TaskRange()


@contextmanager
def claimed(folder: Path, tasks: TaskRange) -> Iterator[None]:
    """Have a range of tasks to oneself, among all that lock in `folder`.

    Raises RecipeError if another converter works on some of them, or the file system knows no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"tasks-{tasks.index}-of-{tasks.count}.lock"
    with (folder / "gate").open("a") as gate:
        _lock(gate, folder)
        try:
            for path in folder.glob("tasks-*-of-*.lock"):
                _, index, _, count = path.stem.split("-")
                other = TaskRange(int(index), int(count))
                if other.overlaps(tasks):
                    _refuse_living(path, other)
            lock = mine.open("w+")
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"process {os.getpid()} on {platform.node()}")
            lock.flush()
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)
        lock.close()


def _refuse_living(path: Path, other: TaskRange) -> None:
    """Raise RecipeError if `path`, the lock of the range `other`, is held; remove it if nobody holds it."""
    try:
        lock = path.open("r+")  # for writing: NFS locks nothing else exclusively
    except FileNotFoundError:  # its holder has just finished
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "all tasks" if other.count == 1 else f"tasks {other}"
            raise RecipeError(
                f"OUT: another vitscale-convert ({lock.read() or 'just starting'}) is at work on {what} there. Several "
                "may share an output if their --task-range i/n do not overlap"
            ) from None
        path.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """One converter at a time, for what must be done once; the others call `waits` and wait. Raises RecipeError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "planning").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            _lock(lock, folder)
        yield


def _lock(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise RecipeError(
            f"{folder}: this file system has no locks ({error.strerror}), which keep two converters apart. "
            "Choose an OUT on one that has (NFS: mount it with locks), or a URL"
        ) from error
