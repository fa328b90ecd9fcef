"""Folders that no other user can have written to."""

import os
import tempfile
from contextlib import suppress
from errno import EPERM
from pathlib import Path
from stat import S_ISDIR, S_ISVTX


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
