"""Writes files and folders that exist under their final name completely or not at all.

Until then they are `.NAME.xxxxxxxx.part`, locked by their writer. What is not locked was left by a killed process.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from vitscale.ground.errors import RecipeError, os_errors
from vitscale.ground.files.locks import LockFile, lock, try_lock
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url, without_file_scheme

_LOCK = "lock"  # in the part of a folder
_SYNCFS_REPORTS_ERRORS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (5, 8)


def forbid_writing_by_everybody() -> None:
    """Set the umask so that nothing this process and its children create is world-writable, even if it was 0."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


@contextmanager
def durable_file(path: str | Path, *, overwrite: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; on leaving, flush it to the disk and rename it.

    The temporary name is unique, so if two processes write one file, the complete file of the last one stays. An
    exception inside leaves nothing behind; a killed process leaves only the temporary file. Raises OSError.

    Without `overwrite`, raises FileExistsError if anything has the name by then, even a link. `mode`: before the umask.
    """
    path = Path(path)
    if not overwrite:
        remove_leftovers(path.parent, path.name)
    part = _part_of(path)
    try:
        with _locked(part, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            rename(part, path, overwrite=overwrite)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def durable_folder(target: Path, *, alone: bool = False) -> Iterator[Path]:
    """`durable_file` for a folder, which replaces nothing but an empty folder. Raises OSError.

    With `alone`, raises FileExistsError at once if another process is writing it, and one of the two would be in vain.
    """
    make_folder(target.parent)
    with ExitStack() as made:
        part, opened = _locked_folder(target, made)
        if remove_leftovers(target.parent, target.name) > 1 and alone:  # ours is one
            raise FileExistsError(errno.EEXIST, "another process is writing it", str(target))
        aside = part / target.name
        aside.mkdir()
        yield aside
        _sync_below(aside, opened)
        rename(aside, target)


@contextmanager
def new_folder(out: str | Path, what: str = "OUT") -> Iterator[Path]:
    """A `durable_folder` that a command writes.

    Args:
        out: a folder on this machine that does not exist or is empty.
        what: the argument's name on the command line, for messages.

    Raises:
        RecipeError: `out` cannot be used.
        DataError: in place of an OSError inside, such as a full disk.
    """
    out = without_file_scheme(str(out))
    if is_url(out):
        raise RecipeError(f"{what} {out}: is written to this machine's disk; expected a folder, not a URL")
    target = Path(os.path.realpath(out))
    made = ExitStack()
    with os_errors(f"{what} {out}: cannot be written", RecipeError):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RecipeError(f"{what} {out}: already exists. Choose a new or empty folder")
        if target.is_mount():
            raise RecipeError(
                f"{what} {out}: is a mount point, which cannot be replaced as a whole. Choose a folder in it"
            )
        folder = made.enter_context(durable_folder(target, alone=True))
    with os_errors(f"{what} {out}: cannot be written"), made:
        yield folder


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless they exist, and flush the new names to the disk. Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def rename(part: Path, path: Path, *, overwrite: bool = True) -> None:
    """Give a file or folder its final name, and flush the folder that it is in to the disk.

    Raises OSError. Then it has its old name again, unless it has replaced a file, whose content is no longer known.
    """
    replaces = path.is_file() or path.is_symlink()
    if overwrite:
        part.replace(path)
    else:
        _take_new_name(part, path)
    try:
        sync(path.parent)
    except OSError:
        if not replaces:
            path.rename(part)
        raise


def _take_new_name(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)
    except OSError:  # the name is taken, or the file system has no hard links: then an empty file reserves the name
        path.touch(exist_ok=False)
        part.replace(path)
    else:
        part.unlink()


def sync(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder, so that a rename survives a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_below(folder: Path, opened: LockFile) -> None:
    """Flush all that is in a folder to the disk; `opened` is a file beside it, opened before any of it was written."""
    # `syncfs` takes all files at once, which may be hundreds of thousands: one by one they take 20 times as long. It
    # reports what could not be written since `opened` was, even to files that are closed.
    libc = ctypes.CDLL(None, use_errno=True)
    error = ctypes.get_errno() if libc.syncfs(opened.fileno()) else 0
    if error == errno.ENOSYS or not _SYNCFS_REPORTS_ERRORS:
        for above, _, names in os.walk(folder):
            for name in (*names, "."):
                sync(Path(above, name))
    elif error:
        raise OSError(error, os.strerror(error))


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # hidden, beside its final name


def _locked(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file, locked until it is closed."""
    file = open(path, "x+b", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    with suppress(OSError):  # without file locks, `remove_leftovers` removes no file
        lock(file)
    # Again if it was taken for a leftover in the moment before it was locked.
    return file if _is_at(file, path) else _locked(path, mode)


def _is_at(file: BinaryIO | LockFile, path: Path) -> bool:
    """Whether an open file still has this name; a link count would not say, as NFS renames what is open."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.lstat())


def _locked_folder(target: Path, made: ExitStack) -> tuple[Path, LockFile]:
    """A new part and the lock in it, both gone when `made` closes."""
    part = _part_of(target)
    made.callback(_remove_part, part)  # before it is there, as Ctrl-C may come right after
    part.mkdir()
    with suppress(FileNotFoundError):  # taken for a leftover, as a file may be
        opened = made.enter_context(LockFile(part / _LOCK))
        if try_lock(opened) and _is_at(opened, part / _LOCK):
            return part, opened
    _remove_part(part)  # so that nobody counts it
    return _locked_folder(target, made)


def _remove_part(part: Path) -> None:
    """Remove a folder's part as far as possible, its lock last: with it, what is left is known to be a leftover."""
    with suppress(OSError):
        for inside in part.iterdir():
            if inside.name != _LOCK:
                shutil.rmtree(inside, ignore_errors=True)
    shutil.rmtree(part, ignore_errors=True)


def remove_leftovers(folder: Path, name: str | None = None) -> int:
    """Remove what killed processes of this user have left in a folder: parts of `name`, or all.

    Returns the number of parts that processes still write. Raises OSError.
    """
    names, living = "*" if name is None else escape(name), 0
    for part in folder.glob(f".{names}.{'[0-9a-f]' * 8}.part"):
        with suppress(OSError):
            is_folder = part.is_dir() and not part.is_symlink()
            if is_folder and part.lstat().st_uid == os.geteuid():
                with suppress(OSError):
                    part.rmdir()  # works if it is empty, without a lock yet or any more
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # not through a link, and without waiting for a pipe
            with LockFile(part / _LOCK, create=False) if is_folder else FileIO(os.open(part, flags), "r+") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    if not try_lock(file):
                        living += 1
                    else:
                        _remove_part(part) if is_folder else part.unlink()
    return living


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, complete or not at all, without secrets of URLs. Raises OSError."""
    with durable_file(path) as file:
        file.write(without_secrets(text).encode("utf-8"))
