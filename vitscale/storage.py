"""Files on this machine or at any URL that fsspec knows: `s3://`, `gs://`, `hf://`, `memory://`.

What a network does now and then (a reset connection, a busy server) is tried again; what stays away after that is a
StorageError, after which the same command may simply be repeated. A missing or forbidden object is no such thing: it
raises FileNotFoundError or PermissionError at once, as a file would.
"""

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitscale.errors import RecipeError, StorageError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PAUSES = (0.5, 2.0, 8.0)  # seconds before the second, third and fourth try
_READ_AHEAD = 8 << 20
_INSTALL = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
}
# What is so, however often one asks.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

_TEMPORARY = (408, 425, 429)  # HTTP: timeout, too early, too many requests

Result = TypeVar("Result")


def is_url(where: str) -> bool:
    """Whether `where` is a URL, not a path of this machine."""
    return _URL.match(where) is not None


def join(where: str, name: str) -> str:
    """`name` inside of the folder `where`."""
    return f"{where.rstrip('/')}/{name}" if is_url(where) else os.path.join(where, name)  # noqa: PTH118


def base_name(where: str) -> str:
    """The last part of a path or URL."""
    return where.rstrip("/").rsplit("/", 1)[-1]


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path within it. Raises RecipeError for a kind that is not installed."""
    import fsspec

    scheme = url.split("://", 1)[0].lower()
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _INSTALL.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        raise RecipeError(f"{url}: reading {scheme}:// needs a package that is not installed: {hint}") from error
    except ValueError as error:
        raise RecipeError(f"{url}: {scheme}:// is no kind of storage that fsspec knows ({error})") from error


def read_bytes(where: str) -> bytes:
    """A whole file. Raises OSError for what is missing or forbidden, StorageError for what does not answer."""
    if not is_url(where):
        return Path(where).read_bytes()
    fs, path = filesystem(where)
    return patiently(where, lambda: fs.cat_file(path))


def open_stream(where: str) -> BinaryIO:
    """A file to be read from the start to the end. Raises as `read_bytes`; reading may raise OSError of any kind."""
    if not is_url(where):
        return Path(where).open("rb")
    fs, path = filesystem(where)
    return patiently(where, lambda: fs.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead"))


def size_of(where: str) -> int | None:
    """Bytes of a file; None if there is none. Raises StorageError."""
    if not is_url(where):
        path = Path(where)
        return path.stat().st_size if path.is_file() else None
    fs, path_there = filesystem(where)

    def ask() -> int | None:
        fs.invalidate_cache()  # of listings: others write there too
        try:
            return fs.info(path_there)["size"]
        except FileNotFoundError:
            return None

    return patiently(where, ask)


def exists(where: str) -> bool:
    """Whether there is a file or a folder. Raises StorageError."""
    return os.path.lexists(where) if not is_url(where) else size_of(where) is not None or is_folder(where)


def is_folder(where: str) -> bool:
    """Whether anything lies below `where`. Raises StorageError."""
    if not is_url(where):
        return Path(where).is_dir()
    fs, path = filesystem(where)
    return patiently(where, lambda: fs.isdir(path))


def names_in(folder: str) -> list[str]:
    """Sorted names of what lies directly in a folder; empty if there is none. Raises OSError or StorageError."""
    if not is_url(folder):
        path = Path(folder)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    fs, there = filesystem(folder)

    def ask() -> list[str]:
        try:
            return sorted({base_name(name) for name in fs.ls(there, detail=False, refresh=True)})
        except FileNotFoundError:
            return []
        except TypeError:  # a file system without listings to refresh
            return sorted({base_name(name) for name in fs.ls(there, detail=False)})

    return patiently(folder, ask)


def put(local: Path, url: str) -> None:
    """Copy a file to a URL and see that it has arrived whole. Raises OSError or StorageError."""
    fs, path = filesystem(url)

    def copy() -> None:
        fs.put_file(str(local), path)
        fs.invalidate_cache()
        arrived, sent = fs.info(path)["size"], local.stat().st_size
        if arrived != sent:
            raise OSError(f"{arrived:,} of {sent:,} bytes arrived")

    patiently(url, copy)


def get(url: str, local: Path) -> None:
    """Copy what is at a URL to a file. Raises OSError or StorageError."""
    fs, path = filesystem(url)
    patiently(url, lambda: fs.get_file(path, str(local)))


def remove_folder(url: str) -> None:
    """Remove all objects below a URL. Raises StorageError."""
    fs, path = filesystem(url.rstrip("/"))

    def delete() -> None:
        fs.invalidate_cache()
        with suppress(FileNotFoundError):
            fs.rm(path, recursive=True)

    patiently(url, delete)


def patiently(where: str, act: Callable[[], Result]) -> Result:
    """What `act` returns, tried four times over ten seconds.

    Raises:
        FileNotFoundError, PermissionError: at once.
        StorageError: with the last reason, when trying does not help.
    """
    for pause in (*_PAUSES, None):
        try:
            return act()
        except _FINAL:
            raise
        except Exception as error:  # each file system has its own exceptions
            status = getattr(error, "status", None)
            if isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY:
                raise FileNotFoundError(
                    errno.ENOENT, f"{os.strerror(errno.ENOENT)} (status {status})", where
                ) from error
            if pause is None:
                raise StorageError(
                    f"{where}: does not answer, or not rightly, in {len(_PAUSES) + 1} tries "
                    f"({type(error).__name__}: {error}). Repeat the command to go on"
                ) from error
            time.sleep(pause)
    raise AssertionError
