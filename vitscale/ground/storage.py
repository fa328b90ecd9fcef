"""Files on this machine or at any URL that fsspec knows: `s3://`, `gs://`, `hf://`, `memory://`.

A network's passing errors (a reset connection, a busy server) are retried; if they persist they become a StorageError,
after which the same command may simply be repeated. A missing or forbidden object is not retried: it raises
FileNotFoundError or PermissionError at once, as a file would.
"""

import asyncio
import concurrent.futures
import errno
import os
import re
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitscale.ground.errors import RecipeError, StorageError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PAUSES = (0.5, 2.0, 8.0)  # seconds before the second, third and fourth attempts
_TRY_SECONDS = 60.0  # for one attempt at a query, a small file or a piece of a large one
_SLOWEST = 1e6  # bytes a second; sending a file more slowly counts as no answer
_POLL_SECONDS = 0.1
_READ_AHEAD = 8 << 20
_PIECE_BYTES = 8 << 20
_CONNECTIONS = 4
_MOST_TEXT, _MOST_BYTES = 64 << 20, 1 << 30
_MOST_AT_ONCE = 200 << 20  # bytes of a whole file that are read into memory from a URL
_MOST_LEFT = 4 << 30  # bytes of a disk that stay free, or a twentieth of a small one
_SPLIT = re.compile(r"(train(ing)?|dev|val(id(ation)?)?|test)(?![a-z0-9])", re.IGNORECASE)  # and perhaps which part
PATTERNS = frozenset("*?[")  # to fsspec
_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
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
# Errors that retrying would not change.
_FINAL: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
# The same, by name: these come from packages that may not be installed (botocore, google-auth, azure-core).
_NO_ACCESS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("UnauthorizedSSOTokenError", "SSOTokenLoadError", "ProfileNotFound", "ConfigNotFound", "NoRegionError"),
    *("DefaultCredentialsError", "RefreshError", "ClientAuthenticationError"),
}
# Listings are not cached: others write there too, and those of a large collection would fill the memory. s3fs asks for
# the size of every object before it reads it, unless max_concurrency is 1. Many servers send the checksum of the whole
# object with a piece of it (ceph/ceph#61901), which botocore then refuses unless validation is "when_required".
_S3: dict[str, Any] = {"max_concurrency": 1, "config_kwargs": {"response_checksum_validation": "when_required"}}
# A URL may be a stranger's, and these make files of templates, unpickle what a server sends, or copy all to the disk.
_REFUSED = {"reference", "dask", "jupyter", "jlab", "simplecache", "filecache", "blockcache", "cached"}

_TEMPORARY = (408, 425, 429)  # HTTP: timeout, too early, too many requests

Result = TypeVar("Result")


def never() -> bool:
    """False: the `cancelled` of work that nobody cancels."""
    return False


def is_url(where: str) -> bool:
    """Whether `where` is a URL, not a path of this machine."""
    return _URL.match(where) is not None


def without_file_scheme(where: str) -> str:
    """`file:///a/b` as the path `/a/b`; anything else unchanged."""
    return where.removeprefix("file://") if where.startswith("file:///") else where


def join(where: str, name: str) -> str:
    """The path or URL of `name` in the folder `where`."""
    return f"{where.rstrip('/')}/{name}" if is_url(where) else os.path.join(where, name)  # noqa: PTH118


def base_name(where: str) -> str:
    """The last part of a path or URL."""
    return where.rstrip("/").rsplit("/", 1)[-1]


def collection_name(where: str) -> str:
    """The last part that names no split: `photos` of `DATA/photos`, `photos/test` and `photos/test-clean.tar`."""
    folder, _, last = where.rstrip("/").rpartition("/")
    return base_name(folder) or last if _SPLIT.match(last) else last


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises RecipeError for a kind unknown or not installed."""
    import fsspec

    scheme, _, path = url.partition("://")
    scheme = scheme.lower()
    url = f"{scheme}://{path}"
    kinds = {part.partition("://")[0].lower() for part in url.split("::")}  # zip://a.jpg::https://...
    if refused := _REFUSED & kinds:
        raise RecipeError(f"{url}: {refused.pop()}:// is not read: it runs programs or fills disks. Name the file")
    options: dict[str, Any] = dict.fromkeys(kinds & {"s3", "s3a"}, _S3)
    options |= {kind: {"get_client": _http_client} for kind in sorted(kinds & {"http", "https"})}
    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        package = _INSTALL.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        raise RecipeError(f"{url}: reading {scheme}:// needs a package that is not installed: {hint}") from error
    except OSError:
        raise
    except Exception as error:  # also of archives, which are opened at once
        raise RecipeError(f"{url}: {scheme}:// is not a kind of storage that fsspec supports ({error})") from error


async def _http_client(**options: Any) -> Any:
    """A client of aiohttp that reads no more of an answer into memory than was asked for, nor a file of any size."""
    import aiohttp

    class Answer(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
            most = int(asked[2]) - int(asked[1]) + 1 if asked else _MOST_AT_ONCE
            try:
                await self.content.readexactly(most + 1)
            except asyncio.IncompleteReadError as error:
                self._body = error.partial
                return error.partial
            self.close()
            raise OSError(errno.EFBIG, f"more than {most:,} bytes came")

    return aiohttp.ClientSession(response_class=Answer, **options)


def regular(path: str | bytes | Path, flags: int, mode: int = 0o666) -> int:
    """The `opener` of `open` and FileIO for files that others may have put there.

    Raises OSError at once for a pipe or a device, which may never end, and for a folder or a socket. To write, also for
    a link and for a file with other names (hard links), since what these lead to may be anything.
    """
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    descriptor = os.open(path, flags, mode)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (writes and found.st_nlink > 1):
        os.close(descriptor)
        kind = "has other names (hard links)" if stat.S_ISREG(found.st_mode) else "is not a regular file"
        raise OSError(errno.EINVAL, kind, os.fsdecode(path))
    return descriptor


def read_bytes(where: str | Path) -> bytes:
    """A whole file's content. Raises OSError if it is missing, forbidden, no regular file or longer than 1 GiB,
    StorageError if a URL does not answer.
    """
    where = str(where)
    if not is_url(where):
        with open(where, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:  # of holes, which take no space on the disk
                raise OSError(errno.EFBIG, f"is longer than {_MOST_BYTES >> 30} GiB", where)
            return file.read()
    fs, path = filesystem(where)
    part = {} if fs.async_impl else {"start": 0, "end": _MOST_AT_ONCE + 1}  # it may be in an archive, and grow
    content: bytes = patiently(where, lambda: _Call(fs, "cat_file", path, **part).result())
    if len(content) > _MOST_AT_ONCE:
        raise OSError(errno.EFBIG, f"more than {_MOST_AT_ONCE:,} bytes", where)
    return content


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """A named text of up to 64 MiB: a regular file, stdin or `<(...)`. Raises OSError, UnicodeDecodeError."""
    with open(path, "rb", opener=None if str(path).startswith(_PIPES) else regular) as file:
        content = file.read(_MOST_TEXT + 1)
    if len(content) > _MOST_TEXT:
        raise OSError(errno.EFBIG, f"is longer than {_MOST_TEXT >> 20} MiB", str(path))
    return content.decode(encoding)


class RemoteFile:
    """A file at a URL, read in pieces. Waits raise CancelledError within a second after `cancelled` returns True.

    Its methods raise as `read_bytes` does.
    """

    def __init__(self, url: str, cancelled: Callable[[], bool] = never) -> None:
        self._url, self._cancelled = url, cancelled
        self._fs, self._path = filesystem(url)

    def size(self) -> int | None:
        """The file's size in bytes; None if the server does not say."""
        size: int | None = self._patiently(lambda: _Call(self._fs, "info", self._path).result(self._cancelled))["size"]
        return size

    def pieces(self, size: int) -> Iterator[bytes]:
        """The file's `size` bytes, in order, in pieces of up to 8 MiB, fetched over four connections if possible."""
        starts = range(0, size, _PIECE_BYTES)
        under_way: deque[_Call] = deque()
        try:
            for index, start in enumerate(starts):
                for ahead in starts[index + len(under_way) : index + _CONNECTIONS]:
                    under_way.append(self._ask(ahead, size))
                yield self._piece(start, size, under_way.popleft())
        finally:
            for call in under_way:
                call.cancel()

    def _ask(self, start: int, size: int) -> "_Call":
        # A file of one piece is requested as a whole, so that it works on servers without ranges, too.
        part = {} if size <= _PIECE_BYTES else {"start": start, "end": min(start + _PIECE_BYTES, size)}
        return _Call(self._fs, "cat_file", self._path, **part)

    def _piece(self, start: int, size: int, first_try: "_Call") -> bytes:
        tries = [first_try]
        expected = min(_PIECE_BYTES, size - start)

        def fetch() -> bytes:
            call = tries.pop() if tries else self._ask(start, size)
            content: bytes = call.result(self._cancelled)
            if len(content) != expected:
                raise OSError(f"{len(content):,} bytes came where {expected:,} were asked for")
            return content

        return self._patiently(fetch)

    def _patiently(self, act: Callable[[], Result]) -> Result:
        return patiently(self._url, act, lambda seconds: pause(seconds, self._cancelled))


class _Call:
    """A call to a file system. If that is asynchronous, the call starts at once and has a time limit.

    The libraries' own limits apply to silence, and multiply: s3fs tries five times what botocore tries five times for
    15 s each. A server that sends a byte now and then would hold a call forever.
    """

    def __init__(self, fs: Any, name: str, *arguments: Any, **options: Any) -> None:
        self._future: concurrent.futures.Future[Any] | None = None
        if fs.async_impl:
            self._future = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{name}")(*arguments, **options), fs.loop)
        else:
            self._act = partial(getattr(fs, name), *arguments, **options)

    def result(self, cancelled: Callable[[], bool] = never, more_seconds: float = 0.0) -> Any:
        """The call's result. Raises its error, TimeoutError after a minute plus `more_seconds`, or CancelledError."""
        if self._future is None:
            if cancelled():
                raise CancelledError
            return self._act()
        seconds = _TRY_SECONDS + more_seconds
        end = time.monotonic() + seconds
        try:
            while not concurrent.futures.wait([self._future], _POLL_SECONDS).done:
                if cancelled():
                    raise CancelledError
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer within {seconds:.0f} s")
        finally:
            self._future.cancel()
        future, self._future = self._future, None
        if future.cancelled():  # by a library, not by this class
            raise ConnectionError("the call was broken off")
        try:
            return future.result()
        finally:
            del future  # its exception would keep this frame alive, and so everything that the callers hold

    def cancel(self) -> None:
        """Give up the call and its connection."""
        if self._future is not None:
            self._future.cancel()


def pause(seconds: float, cancelled: Callable[[], bool]) -> None:
    """Sleep. Raises CancelledError within 0.1 s after `cancelled` returns True."""
    end = time.monotonic() + seconds
    while not cancelled():
        if (left := end - time.monotonic()) <= 0:
            return
        time.sleep(min(left, _POLL_SECONDS))
    raise CancelledError


def open_stream(where: str) -> BinaryIO:
    """Open a file to be read from start to end. Raises as `read_bytes`; reading it may raise any OSError."""
    if not is_url(where):
        return open(where, "rb", opener=regular)
    fs, path = filesystem(where)
    return patiently(where, lambda: fs.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead"))


def size_of(where: str) -> int | None:
    """A file's size in bytes; None if there is no such file. Raises StorageError."""
    if not is_url(where):
        path = Path(where)
        return path.stat().st_size if path.is_file() else None
    info = _ask(where, "info")
    return info["size"] if info is not None and info["type"] == "file" else None


def exists(where: str) -> bool:
    """Whether there is a file or a folder. Raises StorageError."""
    return os.path.lexists(where) if not is_url(where) else _ask(where, "info") is not None


def is_folder(where: str) -> bool:
    """Whether `where` is a folder; at a URL, whether anything lies below it. Raises StorageError."""
    return (_ask(where, "info") or {}).get("type") == "directory" if is_url(where) else Path(where).is_dir()


def _ask(url: str, call: str, **options: Any) -> Any:
    """The file system's answer to a call about a URL, such as `info`; None if nothing is there."""
    fs, path = filesystem(url)

    def ask() -> Any:
        with suppress(FileNotFoundError):
            return _Call(fs, call, path, **options).result()
        return None

    return patiently(url, ask)


def names_in(folder: str) -> list[str]:
    """Sorted names of the entries of a folder; empty if it does not exist. Raises OSError or StorageError."""
    if not is_url(folder):
        path = Path(folder)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return sorted(entry["name"] for entry in _entries(folder))


def sizes_in(folder: str) -> dict[str, int]:
    """Sizes in bytes of the files directly in a folder, by name; empty if it does not exist. Raises as `names_in`."""
    if not is_url(folder):
        path = Path(folder)
        files = path.iterdir() if path.is_dir() else ()
        return {file.name: file.stat().st_size for file in files if file.is_file()}
    return {entry["name"]: entry["size"] for entry in _entries(folder) if entry["type"] == "file"}


def _entries(url: str) -> list[dict[str, Any]]:
    """fsspec's entries directly below a URL, with the last part of each path as `name`."""
    found, there = _ask(url, "ls", detail=True) or [], filesystem(url)[1].rstrip("/")
    # Some stores list a folder in itself.
    others = [entry for entry in found if entry["name"].rstrip("/") != there]
    return [{**entry, "name": base_name(entry["name"])} for entry in others]


def put(local: Path, url: str) -> None:
    """Copy a file to a URL and check that it has arrived whole. Raises OSError or StorageError."""
    fs, path = filesystem(url)

    def copy() -> None:
        sent = local.stat().st_size
        _Call(fs, "put_file", str(local), path).result(more_seconds=sent / _SLOWEST)
        arrived = _Call(fs, "info", path).result()["size"]
        if arrived != sent:
            raise OSError(f"{arrived:,} of {sent:,} bytes arrived")

    patiently(url, copy)


def has_room(where: Path | int, size: int) -> bool:
    """Whether `size` bytes more leave room on the disk of a folder or an open file."""
    disk = shutil.disk_usage(where)
    return disk.free - size >= min(_MOST_LEFT, disk.total // 20)


def get(url: str, local: Path, most: int | None = None) -> None:
    """Copy a file of up to `most` bytes from a URL. Raises OSError, also if it would fill the disk, or StorageError."""
    fs, path = filesystem(url)

    def copy() -> None:
        with fs.open(path, "rb", block_size=0) as source, local.open("wb") as target:  # 0: no ranges
            while piece := source.read(_PIECE_BYTES):
                if most is not None and target.tell() + len(piece) > most:
                    raise OSError(errno.EFBIG, f"more than {most:,} bytes", url)
                if not has_room(local.parent, len(piece)):
                    raise OSError(errno.ENOSPC, f"would fill the disk of {local.parent}; TMPDIR may name a larger", url)
                target.write(piece)

    patiently(url, copy)


def remove(where: str) -> None:
    """Remove a file, if it is there. Raises OSError or StorageError."""
    if is_url(where):
        _ask(where, "rm_file")
    else:
        Path(where).unlink(missing_ok=True)


def remove_folder(url: str) -> None:
    """Remove all objects below a URL without patterns, all of whose matches would go. Raises StorageError."""
    assert not PATTERNS & set(url), url
    _ask(url.rstrip("/"), "rm", recursive=True)


def patiently(where: str, act: Callable[[], Result], sleep: Callable[[float], None] = time.sleep) -> Result:
    """Call `act` up to four times over ten seconds, until it raises nothing; returns its result.

    Raises:
        FileNotFoundError, PermissionError: from `act`, at once, with `where` as the file.
        CancelledError: from `act` or `sleep`, at once.
        StorageError: all attempts failed; the message has the last reason.
    """
    for seconds in (*_PAUSES, None):
        try:
            return act()
        except CancelledError:
            raise
        except Exception as error:  # each file system has its own exceptions
            if isinstance(error, OSError) and isinstance(error, tuple(_FINAL)) and not _hides_an_outage(error):
                raise _of_file(error, where) from error
            if getattr(error, "errno", None) in (errno.EFBIG, errno.ENOSPC):
                raise
            if type(error).__name__ in _NO_ACCESS:
                raise PermissionError(errno.EACCES, f"no access: {error}", where) from error
            status = getattr(error, "status", None)
            if isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY:
                raise FileNotFoundError(
                    errno.ENOENT, f"{os.strerror(errno.ENOENT)} (status {status})", where
                ) from error
            if seconds is None:
                raise StorageError(
                    f"{where}: does not answer, or answers wrongly, in {len(_PAUSES) + 1} tries "
                    f"({type(error).__name__}: {error}). Repeat the command to continue"
                ) from error
            sleep(seconds)
    raise AssertionError


def _hides_an_outage(error: BaseException) -> bool:
    """Whether a "no such file" of a file system over HTTP is really a server that cannot be reached."""
    cause = error.__cause__
    if isinstance(status := getattr(cause, "status", None), int):
        return status >= 500 or status in _TEMPORARY
    return isinstance(cause, ConnectionError | TimeoutError) or type(cause).__module__.startswith("aiohttp")


def _of_file(error: OSError, where: str) -> OSError:
    """The error with an errno, a text and the file: some file systems give only a text, which may be just a path."""
    kind = next(kind for kind in _FINAL if isinstance(error, kind))
    text = error.strerror or str(error)
    return kind(_FINAL[kind], os.strerror(_FINAL[kind]) if text in where else text, where)
