"""The loader's worker threads and what each is currently doing."""

import threading
import time
from collections import deque
from collections.abc import Callable

THREADS = "vitscale-data"
"""How the names of a loader's threads begin."""


class Activity:
    """What each thread waits for, so that a read that never ends can be reported. Safe in threads."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[float, tuple[object, ...]]] = {}

    def begin(self, *words: object) -> None:
        """This thread begins something that may take long: words, joined only if they are asked for."""
        self._now[threading.get_ident()] = (time.monotonic(), words)

    def end(self) -> None:
        """It is done."""
        self._now.pop(threading.get_ident(), None)

    def longest(self) -> tuple[float, str]:
        """Seconds for which a thread has been at the same thing, and what it is; (0, "") if none is at anything."""
        oldest = min(list(self._now.values()), default=None, key=lambda entry: entry[0])
        if oldest is None:
            return 0.0, ""
        return time.monotonic() - oldest[0], " ".join(str(word) for word in oldest[1])


class Crew:
    """Daemon threads, begun with the first task, that take tasks from one queue. A task does not raise.

    Unlike those of `concurrent.futures`, they do not keep the process from ending when a read never returns.
    """

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._threads: list[threading.Thread] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def submit(self, task: Callable[[], None]) -> None:
        """To be done after those that were submitted before. Nothing is begun after `stop`."""
        with self._changed:
            if self._stopping:
                return
            self._tasks.append(task)
            if len(self._threads) < self._size:
                name = f"{THREADS}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()  # which may fail, and then is not to be joined
                self._threads.append(thread)
            self._changed.notify()

    def stop(self) -> None:
        """Drop what has not begun; what has ends by itself. Never waits."""
        with self._changed:
            self._stopping = True
            self._tasks.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads to end, once stopped."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._tasks and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                task = self._tasks.popleft()
            task()
            del task  # it may hold a batch
