"""What may lie where a file is expected."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can act for other users")
PRECIOUS = b"a model of last year"
NO_HANG = pytest.mark.timeout(60)  # a pipe that is waited for is an error, not a test suite that never ends

IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}


def a_hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)
