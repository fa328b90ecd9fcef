"""File locks by `flock`, the only kind used: the kernel releases those of a process that dies, so none is left behind.

All functions raise OSError on a file system without locks. On NFS an exclusive lock needs a file that is open for
writing, and a shared lock one that is open for reading.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO


def lock(file: IO | FileIO, *, shared: bool = False) -> None:
    """Lock an open file, waiting if need be. The lock lasts until `unlock`, or until the file is closed everywhere."""
    fcntl.flock(file, _kind(shared))


def try_lock(file: IO | FileIO, *, shared: bool = False) -> bool:
    """Lock an open file as `lock` does, but return False at once if another process holds it."""
    try:
        fcntl.flock(file, _kind(shared) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO | FileIO) -> None:
    """Release the lock, even if forked processes still have the file open."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock exclusively: one thread of one process at a time. Creates the file if missing; it stays."""
    with FileIO(path, "a") as file:
        lock(file)
        yield


def _kind(shared: bool) -> int:
    return fcntl.LOCK_SH if shared else fcntl.LOCK_EX
