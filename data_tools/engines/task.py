"""What an engine runs: independent, repeatable tasks that report their progress."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol


class Progress(Protocol):
    """Receives a task's progress: one more image done, and whether it was rejected."""

    def advance(self, rejected: bool = False) -> None: ...

    def alive(self) -> None:
        """Signals that something long, other than an image, is still in progress."""
        ...


class Task(Protocol):
    """A piece of work. Picklable; running it twice, or partly and then again, gives the same result as once."""

    @property
    def name(self) -> str:
        """The task's name in messages."""
        ...

    def describe(self, position: int) -> str:
        """What messages call the image at a position of the task."""
        ...

    def without(self, position: int, reason: str) -> Any:
        """The task with one image rejected, because workers die on it; None if that is not possible."""
        ...

    def run(self, progress: Progress) -> Any:
        """Run the task; the result is small. Raises VitscaleError for what people can fix."""
        ...


Tick = Callable[[int, int], None]  # images done, images rejected
Run = Callable[[Iterable[Task], Tick], Iterator[Any]]  # an engine: tasks in, what each returns out, as it comes
