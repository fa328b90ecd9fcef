"""Files that exist completely or not at all under their final name."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
