"""Files that exist completely or not at all under their final name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def part_path(path: Path) -> Path:
    """Where a file lives until it is complete: hidden, beside its final name."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def durable_file(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name; on leaving, flush it to the disk and rename it.

    An exception inside leaves nothing behind; a killed process leaves the temporary name only. Raises OSError.
    """
    path = Path(path)
    part = part_path(path)
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
