"""Tasks: independent, repeatable pieces of work that report their progress; and how to run them in this process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Progress:
    """Receives a task's progress: one more image done, and whether it was rejected."""

    def advance(self, rejected: bool = False) -> None: ...

    def alive(self) -> None:
        """Signals that something long, other than an image, is still in progress."""


class Task(ABC):
    """A piece of work. Picklable; running it twice, or partly and then again, gives the same result as once."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name in messages."""

    @abstractmethod
    def run(self, progress: Progress) -> Any:
        """Run the task; the result is small. Raises VitscaleError for what people can fix."""

    def describe(self, position: int) -> str:
        """What messages call the image at a position of the task."""
        return f"image {position:,} of {self.name}"

    def without(self, position: int, reason: str) -> Any:
        """The task with one image rejected, because workers die on it; None if none may be left out unnoticed."""
        return None


Tick = Callable[[int, int], None]  # images done, images rejected
Run = Callable[[Iterable[Task], Tick], Iterator[Any]]  # runs tasks; what each returns, as it comes


class _Counts(Progress):
    """Progress as numbers of images; `tick` is called at each."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._done = self._rejected = 0

    def advance(self, rejected: bool = False) -> None:
        self._done += 1
        self._rejected += rejected
        self._tick(self._done, self._rejected)


def run_inline(tasks: Iterable[Task], tick: Tick) -> Iterator[Any]:
    """Run tasks in this process, in turn, for what no other can see (`memory://`). Raises what a task raises."""
    counts = _Counts(tick)
    for task in tasks:
        yield task.run(counts)
