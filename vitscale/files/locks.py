"""The one kind of lock: `flock`, which the kernel takes from a process that dies, so that none has to be cleaned up.

All functions raise OSError on a file system without locks. NFS locks exclusively only what is open for writing, and
shares only what is open for reading.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO


def lock(file: IO | FileIO, *, shared: bool = False) -> None:
    """Wait for the lock of an open file. It lasts until `unlock`, or until the file is closed in every process."""
    fcntl.flock(file, _kind(shared))


def try_lock(file: IO | FileIO, *, shared: bool = False) -> bool:
    """Take the lock of an open file as `lock` does, or return False at once where somebody else holds it."""
    try:
        fcntl.flock(file, _kind(shared) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO | FileIO) -> None:
    """Release the lock, also for forked processes that still have the file open."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock exclusively: one thread of one process at a time. The file is made and stays."""
    with FileIO(path, "a") as file:
        lock(file)
        yield


def _kind(shared: bool) -> int:
    return fcntl.LOCK_SH if shared else fcntl.LOCK_EX
