"""Folders on this machine's disk that exist for as long as any process uses them.

Each contains a file on which its users hold a shared lock; the kernel releases those of a process that dies. A folder
that is not locked is rubbish: its last user removes it, or else the next process that creates one beside it. `lock`, in
the folder above, is held for the moments in which folders are created and removed.
"""

import os
import shutil
import weakref
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from vitscale.files.locks import lock, locked, try_lock, unlock

_IN_USE = "in-use"


class MachineFolder:
    """A folder of this machine, removed with the last `MachineFolder` of its name in any process. A context manager.

    Args:
        above: the folder to create it in, which contains nothing else.
        name: its name in there.

    Attributes:
        path: the folder's path.

    Raises OSError.
    """

    def __init__(self, above: Path, name: str) -> None:
        self.path = above / name
        above.mkdir(parents=True, exist_ok=True)
        with _alone(above):
            for other in above.iterdir():
                if other.is_dir():
                    _remove_unused(other)
            self.path.mkdir(exist_ok=True)
            in_use = FileIO(self.path / _IN_USE, "a+")  # to read and write, as NFS requires for both kinds of lock
            lock(in_use, shared=True)
        self._release = weakref.finalize(self, _release, self.path, in_use, os.getpid())

    def release(self) -> None:
        """Stop using the folder. Harmless when repeated; also happens when this object is garbage-collected."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _alone(above: Path) -> AbstractContextManager[None]:
    return locked(above / "lock")


def _release(folder: Path, in_use: FileIO, owner: int) -> None:
    if os.getpid() != owner:  # a forked process shares its parent's lock and must not release it
        return
    with suppress(OSError), _alone(folder.parent):
        unlock(in_use)
        _remove_unused(folder)
    in_use.close()


def _remove_unused(folder: Path) -> None:
    """Remove a folder, unless it is in use or another user's. Only call this within `_alone`."""
    with suppress(OSError), FileIO(folder / _IN_USE, "a+") as in_use:
        if try_lock(in_use):
            shutil.rmtree(folder, ignore_errors=True)
