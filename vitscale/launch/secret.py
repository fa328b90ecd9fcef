"""The secret of a launch over several nodes: in the run directory, which they share, and unreadable to other users.

Node 0 writes a new one for each launch. Whoever has it can start ranks on all nodes, and end the run.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.durable import durable_file, make_folder
from vitscale.runs.names import SECRET_FILE

SECRET_BYTES = 32


def write_secret(run_dir: Path, secret: bytes) -> None:
    """Write the secret for the other nodes. Raises `RecipeError` if it cannot be, or others could read it."""
    try:
        make_folder(run_dir)
        with durable_file(run_dir / SECRET_FILE, mode=0o600) as file:
            file.write(secret)
        read_secret(run_dir)
    except OSError as error:
        raise RecipeError(
            f"{run_dir}: {error.strerror or error}. The nodes of a launch know each other by a file there: choose a "
            f"--run-dir that all of them can write to, on a file system with owners and permissions"
        ) from None


def read_secret(run_dir: Path) -> bytes:
    """The secret that node 0 has written. Raises OSError, in words, also if others could have written or read it."""
    path = run_dir / SECRET_FILE
    try:
        with tempfile.TemporaryFile(dir=run_dir) as ours:  # where a server takes root for nobody, files are nobody's
            owner = os.fstat(ours.fileno()).st_uid
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found, secret = os.fstat(file.fileno()), os.read(file.fileno(), SECRET_BYTES + 1)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from None
    about = f"{len(secret)} bytes, {stat.filemode(found.st_mode)}, uid {found.st_uid}"
    if about != (expected := f"{SECRET_BYTES} bytes, -rw-------, uid {owner}"):
        raise OSError(f"{path}: {about}; node 0 writes {expected}")
    return secret


def remove_secret(run_dir: Path, secret: bytes) -> None:
    """Remove the secret, unless another launch has written its own since."""
    with suppress(OSError):
        if read_secret(run_dir) == secret:
            (run_dir / SECRET_FILE).unlink()
