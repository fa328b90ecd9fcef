"""Folders on this machine's disk that exist for as long as any process uses them.

Each contains a file on which its users hold a shared lock; the kernel releases those of a process that dies. A folder
with such a file that is not locked is rubbish: its last user removes it, or else the next process that creates one
beside it. `lock`, in the folder above, is held for the moments in which folders are created and removed.
"""

import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.locks import LockFile, lock, locked, try_lock, unlock
from vitscale.ground.files.private_folders import private_folder

_IN_USE, _LOCK = "in-use", "lock"


class MachineFolder:
    """A folder of this machine, removed with the last `MachineFolder` of its name in any process. A context manager.

    Args:
        above: the folder to create it in, for these folders alone; no other user may write to it.
        name: its name in there.

    Attributes:
        path: the folder's path.

    Raises OSError, and RecipeError if `above` holds anything else, which is left as it is.
    """

    def __init__(self, above: Path, name: str) -> None:
        above = private_folder(above)
        self.path = above / name
        with locked(above / _LOCK):
            for other in above.iterdir():
                if not other.name.startswith(_LOCK):  # nor its owner file
                    _remove_unused(other)
            self.path.mkdir(exist_ok=True)
            in_use = LockFile(self.path / _IN_USE)
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


def _release(folder: Path, in_use: LockFile, owner: int) -> None:
    if os.getpid() != owner:  # a forked process shares its parent's lock and must not release it
        return
    with suppress(OSError, RecipeError), locked(folder.parent / _LOCK):
        unlock(in_use)
        _remove_unused(folder)
    in_use.close()


def _remove_unused(folder: Path) -> None:
    """Remove a folder that a `MachineFolder` made, unless it is in use. Only call this with the lock held.

    Raises RecipeError for anything else.
    """
    try:
        with LockFile(folder / _IN_USE, create=False) as in_use:
            if not folder.is_symlink():
                if try_lock(in_use):
                    shutil.rmtree(folder, ignore_errors=True)
                return
    except OSError:
        with suppress(OSError):
            return folder.rmdir()  # empty: of a process that was killed at once
    raise RecipeError(
        f"{folder}: was not put there by vitscale, which keeps copies of remote checkpoints in {folder.parent} and "
        f"removes them. Move it away, or choose another data.cache.dir"
    )
