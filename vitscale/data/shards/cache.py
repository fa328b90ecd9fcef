"""A cache on this machine's disk for shards at URLs: each fetched once, shared by all processes, within a limit.

A file is named by its content, so that all datasets and views that share a shard share the file. While it is fetched
its name ends in `.part`; it is renamed once its digest is right. A file that is there already is compared with its name
once by each user of a machine, since whoever may write to the folder may have put it there.

Three kinds of locks keep the processes apart; the kernel releases those of a process that dies, so none has to be
cleaned up. `lock` is held for the moments in which files are created, renamed or removed. The writer of a `.part` locks
it exclusively: one that is not locked is rubbish. Each user of a file holds a shared lock on it: a file without locks
may be removed.
"""

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from vitscale.data.shards.manifest import MANIFEST_NAME, ShardEntry
from vitscale.data.shards.verified import digest_once, markers_in
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.fetching import Promise, WrongContentError, fetch
from vitscale.ground.files.locks import NO_LOCKS, is_locked, lock, try_lock, unlock
from vitscale.ground.storage import never, pause, regular

_OURS = re.compile(r"(?P<shard>[0-9a-f]{32}-[0-9]+\.beton)(?P<part>\.[0-9a-f]{8}\.part)?")
_POLL_SECONDS = 0.05
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_GB = 10**9

_log = logging.getLogger(__name__)


class PinnedFile(AbstractContextManager["PinnedFile"]):
    """A file of the cache at `path` that stays there until it is released or this process ends. A context manager."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file: FileIO | None = file  # open, its lock shared

    def release(self) -> None:
        """Let the cache remove the file when it needs room; open descriptors stay readable. Harmless when repeated."""
        file, self._file = self._file, None
        if file is not None:
            unlock(file)  # closing alone would leave it locked in a process that was forked meanwhile
            file.close()

    def __exit__(self, *_: object) -> None:
        self.release()


class _CachedFile(NamedTuple):
    """A file of the cache: the shard that it is or becomes, whether it is a `.part`, its bytes and time of last use."""

    path: Path
    shard: str
    is_part: bool
    bytes: int
    used: float


class ShardCache:
    """The cache of shards at URLs in a folder of this machine, shared by all of its processes.

    The least recently used shards make room for others. A pinned file is never removed: if the pinned files together
    exceed the limit, the cache grows beyond it, with one warning, since waiting could last forever. Files without a
    name of the cache's pattern are neither counted nor removed.

    The folder is for its files alone and created if missing; `limit_bytes` is the limit for all of them together,
    finished or not. Raises RecipeError if the folder cannot be written, has no file locks, or is a dataset.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit, self._markers = folder, limit_bytes, markers_in(folder.parent)
        self._has_warned = False
        if (folder / MANIFEST_NAME).exists() or (folder.parent / MANIFEST_NAME).exists():
            raise RecipeError(f"data.cache.dir: {folder} is a dataset; choose a folder of its own for the cache")
        with self._problems_of_disk(), self._alone():
            pass

    def pin(self, url: str, entry: ShardEntry, cancelled: Callable[[], bool] = never) -> PinnedFile:
        """A shard's file, fetched if it is not here; waits if another process is already fetching it.

        Raises:
            DataError: the shard does not exist, may not be read, or is not what the manifest says.
            StorageError: the URL does not answer, or not within a minute in each of several attempts.
            RecipeError: the disk or the limit is too small.
            CancelledError: `cancelled`, which is polled ten times a second while this waits, returned True.
        """
        if entry.bytes > self._limit:
            raise RecipeError(
                f"data.cache.limit_gb: {self._limit / _GB:g} is less than one shard ({url}: "
                f"{entry.bytes / _GB:.3g} GB); set a larger one"
            )
        name = f"{entry.xxh3_128}-{entry.bytes}.beton"
        with self._problems_of_disk():
            while (pinned := self._pin_present(name, entry, cancelled)) is None:
                begun = self._begin(name, entry.bytes)
                if isinstance(begun, FileIO):
                    return self._fetch(url, entry, begun, self._folder / name, cancelled)
                while begun is not None and is_locked(begun):
                    pause(_POLL_SECONDS, cancelled)
            return pinned

    def _pin_present(self, name: str, entry: ShardEntry, cancelled: Callable[[], bool]) -> PinnedFile | None:
        path = self._folder / name
        while True:
            if path.is_symlink():
                return None  # it is replaced
            try:
                file = FileIO(path, opener=regular)
            except FileNotFoundError:
                return None
            if not try_lock(file, shared=True):  # it is being removed
                file.close()
                pause(_POLL_SECONDS, never)
            elif not _is_at(file, path):  # it was removed between opening and locking
                file.close()
            elif self._digest(file, path, cancelled, entry) == entry.xxh3_128:
                with suppress(OSError):  # the file is another user's
                    os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
                return PinnedFile(path, file)
            else:  # it is not what its name says
                with self._alone():
                    if _is_at(file, path):
                        path.unlink()
                file.close()

    def _digest(self, file: FileIO, path: Path, cancelled: Callable[[], bool], entry: ShardEntry) -> str | None:
        """The digest of an open file; None if it has another size than the shard. An error closes the file."""
        try:
            if os.fstat(file.fileno()).st_size != entry.bytes:
                return None
            return digest_once(file, path, self._markers, cancelled, in_cache=True)
        except BaseException:
            file.close()
            raise

    def _begin(self, name: str, size: int) -> FileIO | Path | None:
        """A new `.part` for a shard, locked; the path of another process's; or None if the shard has just arrived."""
        with self._alone():
            files = self._files()
            if any(file.shard == name and not file.is_part for file in files):
                return None
            for file in [file for file in files if file.is_part]:
                if _remove_unused(file.path):
                    files.remove(file)
                elif file.shard == name:
                    return file.path
            self._make_room(files, size)
            part = FileIO(self._folder / f"{name}.{secrets.token_hex(4)}.part", "x+")
            lock(part)
            os.truncate(part.fileno(), size)  # so that it counts with its full size while it is fetched
            return part

    def _files(self) -> list[_CachedFile]:
        """The cache's files, the least recently used first."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _OURS.fullmatch(entry.name)
                if match is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        is_part = match["part"] is not None
                        files.append(_CachedFile(Path(entry), match["shard"], is_part, stat.st_size, stat.st_atime))
        return sorted(files, key=lambda file: file.used)

    def _make_room(self, files: list[_CachedFile], size: int) -> None:
        used = sum(file.bytes for file in files)
        for file in files:
            if used + size <= self._limit:
                return
            if not file.is_part and _remove_unused(file.path):
                used -= file.bytes
        if used + size > self._limit and not self._has_warned:
            self._has_warned = True
            _log.warning(
                f"{self._folder}: the shards in use at once take {(used + size) / _GB:.3g} GB, more than "
                f"data.cache.limit_gb allows ({self._limit / _GB:g}); the cache grows beyond it while they are in use"
            )

    def _fetch(
        self, url: str, entry: ShardEntry, part: FileIO, path: Path, cancelled: Callable[[], bool]
    ) -> PinnedFile:
        grown = Path(part.name)
        try:
            self._transfer(url, entry, part, cancelled)
            # The name promises the content, even after a power cut, and the content is not read again to check. A lost
            # name only costs another transfer, hence the folder is not flushed.
            os.fsync(part.fileno())
            with self._alone():  # no process may remove it before the lock has become a shared one
                grown.replace(path)
                lock(part, shared=True)
        except BaseException:
            grown.unlink(missing_ok=True)
            part.close()
            raise
        digest_once(part, path, self._markers, in_cache=True, found=entry.xxh3_128)
        return PinnedFile(path, part)

    def _transfer(self, url: str, entry: ShardEntry, part: FileIO, cancelled: Callable[[], bool]) -> None:
        def write(piece: bytes, position: int) -> None:
            with self._problems_of_disk():  # so that any other OSError comes from the URL
                self._write(part, piece, position)

        promise = Promise(entry.bytes, "xxh3_128", entry.xxh3_128, "the manifest")
        try:
            fetch(url, promise, xxhash.xxh3_128, write, cancelled)
        except WrongContentError as error:
            raise DataError(f"{error}. Restore the shard that the manifest lists") from None
        except FileNotFoundError as error:
            raise DataError(f"{url}: missing, but the manifest lists it") from error
        except OSError as error:
            raise DataError(f"{url}: cannot be read ({error.strerror or type(error).__name__})") from error

    def _write(self, part: FileIO, content: bytes, position: int) -> None:
        rest = memoryview(content)
        while rest:
            try:
                written = os.pwrite(part.fileno(), rest, position)
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                # The disk is smaller than the limit: the least recently used file that is not in use makes room.
                with self._alone():
                    if not any(_remove_unused(file.path) for file in self._files()):
                        raise
                continue
            rest, position = rest[written:], position + written

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclusive use of the cache, by one thread of one process of this machine; for moments. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileIO(self._folder / "lock", "a", opener=regular) as file:  # of all users, unlike a LockFile
            lock(file)
            yield

    @contextmanager
    def _problems_of_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            what = f"cannot be written ({why}); choose another folder"
            if error.errno in NO_LOCKS:
                what = (
                    f"this file system has no locks ({why}), which keep processes apart; choose a folder on a disk of "
                    f"this machine"
                )
            if error.errno in _NO_SPACE:
                what = (
                    f"the disk is full ({why}), and no shard there is unused. Make room, or choose another folder; "
                    f"data.cache.limit_gb ({self._limit / _GB:g}) limits the size of the cache"
                )
            raise RecipeError(f"data.cache.dir: {self._folder}: {what}") from error


def _is_at(file: FileIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _remove_unused(path: Path) -> bool:
    """Remove a file, unless it is locked or another user's; whether it is gone. Only call this within `_alone`."""
    try:
        with FileIO(path, "r+", opener=regular) as file:
            if not try_lock(file):
                return False
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    return True
