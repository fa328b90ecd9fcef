"""Run tasks one after the other in this process: for what no other process can see, such as `memory://`."""

from collections.abc import Iterable, Iterator
from typing import Any

from data_tools.engines.task import Task, Tick


class _Counter:
    def __init__(self, tick: Tick) -> None:
        self._tick, self._done, self._rejected = tick, 0, 0

    def advance(self, rejected: bool = False) -> None:
        self._done += 1
        self._rejected += rejected
        self._tick(self._done, self._rejected)

    def alive(self) -> None:
        pass


def run_inline(tasks: Iterable[Task], tick: Tick) -> Iterator[Any]:
    """Run tasks, yielding what each returns. Raises what a task raises."""
    counter = _Counter(tick)
    for task in tasks:
        yield task.run(counter)
