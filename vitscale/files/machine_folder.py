"""Folders on this machine's disk that are there for as long as a process uses them.

Each holds a file that its users lock together; the kernel takes the lock from a process that dies. A folder that nobody
has locked is rubbish, and is removed by its last user, or else by the next process that makes one beside it. `lock`, in
the folder above, is held for the moments in which folders come and go.
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
        above: the folder in which it is made, which holds nothing else.
        name: in there.

    Attributes:
        path: of the folder.

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
            in_use = FileIO(self.path / _IN_USE, "a+")  # NFS locks what can be written, and shares what can be read
            lock(in_use, shared=True)
        self._release = weakref.finalize(self, _release, self.path, in_use, os.getpid())

    def release(self) -> None:
        """Let go of the folder. Once or more; also what happens when this object is forgotten."""
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
    if os.getpid() != owner:  # a process that was forked shares the lock with the one that it came from
        return
    with suppress(OSError), _alone(folder.parent):
        unlock(in_use)
        _remove_unused(folder)
    in_use.close()


def _remove_unused(folder: Path) -> None:
    """Remove a folder unless somebody uses it, or it is another user's. For whoever is alone."""
    with suppress(OSError), FileIO(folder / _IN_USE, "a+") as in_use:
        if try_lock(in_use):
            shutil.rmtree(folder, ignore_errors=True)
