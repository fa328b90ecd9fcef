"""Lets several converters share one output: each locks a range of the tasks for itself.

A lock is held by a living process and by nothing else: one that was killed leaves a file that locks nothing.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from vitscale.errors import RecipeError
from vitscale.files.locks import lock, try_lock, unlock

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
        with _no_locks(folder):
            lock(gate)
        try:
            for path in folder.glob("tasks-*-of-*.lock"):
                _, index, _, count = path.stem.split("-")
                other = TaskRange(int(index), int(count))
                if other.overlaps(tasks):
                    _refuse_living(path, other)
            held = mine.open("w+")
            lock(held)
            held.write(f"process {os.getpid()} on {platform.node()}")
            held.flush()
        finally:
            unlock(gate)
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)
        held.close()


def _refuse_living(path: Path, other: TaskRange) -> None:
    """Raise RecipeError if `path`, the lock of the range `other`, is held; remove it if nobody holds it."""
    try:
        file = path.open("r+")  # for writing: NFS locks nothing else exclusively
    except FileNotFoundError:  # its holder has just finished
        return
    with file:
        if not try_lock(file):
            what = "all tasks" if other.count == 1 else f"tasks {other}"
            raise RecipeError(
                f"OUT: another vitscale-convert ({file.read() or 'just starting'}) is at work on {what} there. Several "
                "may share an output if their --task-range i/n do not overlap"
            )
        path.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """One converter at a time, for what must be done once; the others call `waits` and wait. Raises RecipeError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "planning").open("a") as file:
        with _no_locks(folder):
            is_free = try_lock(file)
        if not is_free:
            waits()
            lock(file)
        yield


@contextmanager
def _no_locks(folder: Path) -> Iterator[None]:
    """Turn the OSError of a file system without locks into a RecipeError."""
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"{folder}: this file system has no locks ({error.strerror}), which keep two converters apart. "
            "Choose an OUT on one that has (NFS: mount it with locks), or a URL"
        ) from error
