"""Files and folders that exist completely or not at all under their final name."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vitscale.errors import DataError, RecipeError
from vitscale.storage import is_url, without_file_scheme


def forbid_writing_by_everybody() -> None:
    """What this process and its children make from now on is not world-writable, even where the umask is 0."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


@contextmanager
def durable_file(path: str | Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; on leaving, flush it to the disk and rename it.

    The temporary name is nobody else's: of two writers of one file the last one wins, whole. An exception inside leaves
    nothing behind; a killed process leaves the temporary name only. Raises OSError.

    Without `overwrite` whatever has the name at the end keeps it, a dangling link too: FileExistsError.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # hidden, beside its final name
    try:
        with part.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            part.replace(path)
        else:
            _take_new_name(part, path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _take_new_name(part: Path, path: Path) -> None:
    try:
        path.hardlink_to(part)
    except OSError:  # the name is taken, or the file system has no links: there an empty file reserves it
        path.touch(exist_ok=False)
        part.replace(path)
    else:
        part.unlink()


@contextmanager
def new_folder(out: str | Path, what: str = "OUT") -> Iterator[Path]:
    """Fill a folder under a hidden name; on leaving, flush it to the disk and rename it.

    An exception inside leaves nothing behind; a killed process leaves the hidden name only.

    Args:
        out: a folder of this machine that does not exist, or is empty.
        what: what the command line calls it.

    Raises:
        RecipeError: `out` cannot be taken.
        DataError: in place of an OSError inside: a disk that is full, or refuses.
    """
    out = without_file_scheme(str(out))
    if is_url(out):
        raise RecipeError(f"{what} {out}: is written to this machine's disk; expected a folder, no URL")
    target = Path(os.path.realpath(out))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RecipeError(f"{what} {out}: already exists. Choose a new or empty folder")
        if target.is_mount():
            raise RecipeError(
                f"{what} {out}: is a mount point, which cannot be replaced as a whole. Choose a folder in it"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        aside.mkdir()
    except OSError as error:
        raise RecipeError(f"{what} {out}: cannot be written ({error.strerror})") from error
    try:
        yield aside
        os.sync()  # hundreds of thousands of files at once, instead of one by one
        aside.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise DataError(f"{what} {out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A text file, complete or not at all. Raises OSError."""
    with durable_file(path) as file:
        file.write(text.encode("utf-8"))
