"""vitscale: pre-train Vision Transformers at scale, on your own hardware."""

import os
from contextlib import suppress
from errno import EPERM
from pathlib import Path
from stat import S_ISDIR

__version__ = "0.1.0"


def private_folder(path: Path) -> Path:
    """The folder `path`, made if missing, whose content no other user but root can have written. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise PermissionError(EPERM, "is a link, or other users may write to it", str(path))
    return path


def choose_code_folder(variable: str, usual: str = "") -> None:
    """Set an environment variable, if it is not set, to a private folder for compiled code: whoever can write there can
    have it run. `usual` is its path unless others may write there; then it is in the temporary folder.
    """
    if variable in os.environ:
        return
    import tempfile

    temporary = f"{tempfile.gettempdir()}/vitscale-{variable.lower()}-{os.geteuid()}"
    for place in map(Path, (os.path.expanduser(usual), temporary)):  # noqa: PTH111 (no error where there is no home)
        with suppress(OSError):
            if place.is_absolute():
                os.environ[variable] = str(private_folder(place))
                return
    os.environ[variable] = tempfile.mkdtemp(prefix="vitscale-")


if not os.access(Path(__file__).parent, os.W_OK):  # else numba keeps its kernels beside the source, as Python does
    choose_code_folder("NUMBA_CACHE_DIR", f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/numba")
