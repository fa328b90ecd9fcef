"""Folders that no other user can have written to, and those of this machine that exist as long as a process uses them.

Each of the latter contains a file on which its users hold a shared lock; the kernel releases those of a process that
dies. A folder with such a file that is not locked is rubbish: its last user removes it, or else the next process that
creates one beside it. `lock`, in the folder above, is held for the moments in which folders are created and removed.
"""

import os
import shutil
import tempfile
import weakref
from contextlib import AbstractContextManager, suppress
from errno import EPERM
from pathlib import Path
from stat import S_ISDIR, S_ISVTX

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.locks import LockFile, lock, locked, try_lock, unlock

_IN_USE, _LOCK = "in-use", "lock"


def private_folder(path: Path, forbidden_above: int = 0o002) -> Path:
    """The folder `path`, made if missing, if no other user but root can have written to it or replaced it.

    Those who own the folders above are trusted, and their groups unless 0o022 is `forbidden_above`. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise PermissionError(EPERM, "is a link, or other users may write to it", str(path))
    for above in path.parents:
        found = above.lstat()
        own_group = 0o020 if found.st_gid == os.geteuid() else 0  # which has a user's number, and no other members
        if found.st_mode & forbidden_above & ~own_group and not found.st_mode & S_ISVTX:
            raise PermissionError(EPERM, "other users may rename what is in it", str(above))
    return path


def choose_code_folder(variable: str) -> None:
    """Set an environment variable, if it is not set, to a private folder for compiled code in the temporary folder.

    Whoever can write there can have code run.
    """
    if variable in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"vitscale-{variable.lower()}-{os.geteuid()}"
    try:
        os.environ[variable] = str(private_folder(folder, 0o022))
    except OSError:
        os.environ[variable] = tempfile.mkdtemp(prefix="vitscale-")


class MachineFolder(AbstractContextManager["MachineFolder"]):
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

    def __exit__(self, *_: object) -> None:
        self.release()


def _release(folder: Path, in_use: LockFile, owner: int) -> None:
    if os.getpid() != owner:  # a forked process shares its parent's lock and must not release it
        return
    with suppress(OSError, RecipeError), locked(folder.parent / _LOCK):
        unlock(in_use)
        _remove_unused(folder)
    in_use.close()


def _remove_unused(folder: Path) -> None:
    """With the lock held: remove a `MachineFolder`'s folder, unless used. Raises RecipeError for anything else."""
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
