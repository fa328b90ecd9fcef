"""The loader's worker threads and what each is currently doing."""

import threading
import time
from collections import deque
from collections.abc import Callable

THREADS = "vitscale-data"  # the prefix of the names of a loader's threads


class Activity:
    """What each thread waits for, to report a read that never returns. Thread-safe; `stopping`: the loader closes."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._now: dict[int, tuple[float, tuple[object, ...]]] = {}

    def begin(self, *words: object) -> None:
        """Note that this thread begins something that may take long; `words` are joined only if `longest` asks."""
        self._now[threading.get_ident()] = (time.monotonic(), words)

    def end(self) -> None:
        """Note that this thread has finished it."""
        self._now.pop(threading.get_ident(), None)

    def longest(self) -> tuple[float, str]:
        """The longest wait of any thread now: its seconds so far and what it is; (0, "") if no thread is waiting."""
        oldest = min(list(self._now.values()), default=None, key=lambda entry: entry[0])
        if oldest is None:
            return 0.0, ""
        return time.monotonic() - oldest[0], " ".join(str(word) for word in oldest[1])


class WorkerThreads:
    """Daemon threads that take tasks from one queue, each started when a task is submitted. Tasks must not raise.

    Unlike the threads of `concurrent.futures`, they do not keep the process from ending when a read never returns.
    """

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._threads: list[threading.Thread] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def submit(self, task: Callable[[], None]) -> None:
        """Add a task to the end of the queue. After `stop` it is ignored."""
        with self._changed:
            if self._stopping:
                return
            self._tasks.append(task)
            if len(self._threads) < self._size:
                name = f"{THREADS}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()  # may fail, and a thread that did not start must not be joined
                self._threads.append(thread)
            self._changed.notify()

    def stop(self) -> None:
        """Drop the tasks that have not begun; running ones finish. Never waits."""
        with self._changed:
            self._stopping = True
            self._tasks.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads to end, after `stop`."""
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
