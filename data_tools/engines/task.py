"""What an engine runs: tasks that are independent, repeatable and tell how far they are."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol


class Progress(Protocol):
    """Where a task says that one more image is through, and whether it was of no use."""

    def advance(self, rejected: bool = False) -> None: ...

    def alive(self) -> None:
        """Something long is going on that is no image."""
        ...


class Task(Protocol):
    """A piece of work. Picklable; doing it twice, or half and then again, gives the same as doing it once."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def describe(self, position: int) -> str:
        """What people call the image at a position of the task."""
        ...

    def without(self, position: int, reason: str) -> Any:
        """The task with one image rejected, because of which workers die; None if that is not possible."""
        ...

    def run(self, progress: Progress) -> Any:
        """Do it; what is returned is small. Raises VitscaleError for what people can mend."""
        ...


Tick = Callable[[int, int], None]  # images done, images rejected
Run = Callable[[Iterable[Task], Tick], Iterator[Any]]  # an engine: tasks in, what each returns out, as it comes
