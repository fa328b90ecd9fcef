"""Writes files and folders that exist under their final name completely or not at all."""

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
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # hidden, beside its final name
    try:
        with open(part, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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
    except OSError:  # the name is taken, or the file system has no hard links: then an empty file reserves the name
        path.touch(exist_ok=False)
        part.replace(path)
    else:
        part.unlink()


@contextmanager
def new_folder(out: str | Path, what: str = "OUT") -> Iterator[Path]:
    """Fill a folder under a hidden name; on leaving, flush it to the disk and rename it.

    An exception inside leaves nothing behind; a killed process leaves only the hidden folder.

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
        os.sync()  # all files at once, which may be hundreds of thousands, instead of one by one
        aside.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise DataError(f"{what} {out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, complete or not at all. Raises OSError."""
    with durable_file(path) as file:
        file.write(text.encode("utf-8"))
