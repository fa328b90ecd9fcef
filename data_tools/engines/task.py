"""What an engine runs: independent, repeatable tasks that report their progress; and the simplest engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol


class Progress(Protocol):
    """Receives a task's progress: one more image done, and whether it was rejected."""

    def advance(self, rejected: bool = False) -> None: ...

    def alive(self) -> None:
        """Signals that something long, other than an image, is still in progress."""
        ...


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
Run = Callable[[Iterable[Task], Tick], Iterator[Any]]  # an engine: tasks in, what each returns out, as it comes


class Counts:
    """Progress as numbers of images; `tick` is called at each."""

    def __init__(self, tick: Tick = lambda done, rejected: None) -> None:
        self._tick = tick
        self.done = self.rejected = 0

    def advance(self, rejected: bool = False) -> None:
        self.done += 1
        self.rejected += rejected
        self._tick(self.done, self.rejected)

    def alive(self) -> None:
        pass


def run_inline(tasks: Iterable[Task], tick: Tick) -> Iterator[Any]:
    """Run tasks one after the other in this process: for what no other process can see, such as `memory://`.

    Raises what a task raises.
    """
    counts = Counts(tick)
    for task in tasks:
        yield task.run(counts)
