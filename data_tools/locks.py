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

    Raises RecipeError if another converter is working on some of them, or the file system does not support locks.
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
    """Raise RecipeError if `path`, the lock of the range `other`, is held; remove the file if it is not."""
    try:
        file = path.open("r+")  # for writing: NFS refuses exclusive locks on read-only files
    except FileNotFoundError:  # its holder has just finished
        return
    with file:
        if not try_lock(file):
            what = "all tasks" if other.count == 1 else f"tasks {other}"
            raise RecipeError(
                f"OUT: another vitscale-convert ({file.read() or 'just starting'}) is working on {what} there. Several "
                "may share an output if their --task-range i/n do not overlap"
            )
        path.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Lock for work that one converter does at a time; the others call `waits`, then wait. Raises RecipeError."""
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
    """Turns the OSError of a file system without locks into a RecipeError."""
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"{folder}: this file system has no locks ({error.strerror}), which keep two converters apart. "
            "Choose an OUT on one that has (NFS: mount it with locks), or a URL"
        ) from error
