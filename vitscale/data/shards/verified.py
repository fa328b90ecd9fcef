"""Checks once that a local shard is the one its manifest lists, and remembers the answer.

The answer is valid as long as the file keeps its path, inode, size and times of change. Damage that changes none of
them goes unnoticed, such as that of a disk which returns other bytes than it was given: for that, each sample has a
checksum of its own. Also unnoticed is a change at the very moment of reading. Answers are believed only in a folder to
which no other user may write.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path

import xxhash

from vitscale.data.shards.manifest import ShardEntry
from vitscale.ground.errors import DataError
from vitscale.ground.files.locks import try_lock
from vitscale.ground.files.machine_folder import private_folder
from vitscale.ground.storage import never, pause, regular

_BLOCK_BYTES = 4 << 20
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)
_warned: set[Path] = set()


def markers_in(cache: Path) -> Path:
    """Where this user's answers are in a cache that may be shared with others."""
    return cache / f"verified-{os.geteuid()}"


def verify_once(path: Path, entry: ShardEntry, markers: Path, cancelled: Callable[[], bool] = never) -> None:
    """Compare a shard's bytes with the manifest, unless this machine has already read the file in its present state.

    If several processes want this, one reads and the others wait for it.

    Args:
        path, entry: the shard's path, and its entry in the manifest.
        markers: this user's folder for the remembered answers, created if missing: at most 256 files, which also are
            the locks, with 66 bytes for each shard. If it cannot be written, every process reads, and warns once.
        cancelled: polled for every block that is read, and while another process reads.

    Raises DataError if the shard is missing, cannot be read, or is not what the manifest says, CancelledError if
    `cancelled` returned True.
    """
    try:
        with FileIO(path, opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            found = digest_once(file, path, markers, cancelled) if size == entry.bytes else None
    except FileNotFoundError as error:
        raise DataError(f"{path}: missing, but the manifest lists it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if found != entry.xxh3_128:
        expected = f"{entry.bytes:,} bytes" if found is None else f"xxh3_128 {entry.xxh3_128}"
        raise DataError(
            f"{path}: damaged, or another shard: {f'{size:,} bytes' if found is None else found}; the manifest says "
            f"{expected}. `vitscale shards verify` finds all that is damaged; restore it, or convert it again"
        )


def digest_once(
    file: FileIO,
    path: Path,
    markers: Path,
    cancelled: Callable[[], bool] = never,
    in_cache: bool = False,
    found: str = "",
) -> str:
    """xxh3_128 of an open file: remembered, just `found`, or computed now. Raises OSError, CancelledError."""
    state = _state(file, path, in_cache)
    book = _open_book(markers, state)
    if book is None:
        return found or _digest(file, cancelled)
    with closing(book):
        known = _look_up(book, state)
        if known is None:
            # Wait until this process alone may read; without file locks, several processes read at once.
            with suppress(OSError):
                while not try_lock(book):
                    pause(_POLL_SECONDS, cancelled)
            known = _look_up(book, state)
        if known is None:
            known = found or _digest(file, cancelled)
            if state == _state(file, path, in_cache):  # otherwise it changed meanwhile
                try:
                    book.write(f"{state} {known}\n".encode())  # appended, even if other processes write too
                except OSError as error:
                    _warn(markers, error)
        return known


def _state(file: FileIO, path: Path, in_cache: bool) -> str:
    """A digest of all that changes when a file is replaced or written to, as 32 hexadecimal digits."""
    stat = os.fstat(file.fileno())
    # The cache notes each use of our own files in their times, but for that of writing, which nobody else can set back.
    changed = 0 if in_cache and stat.st_uid in (0, os.geteuid()) else stat.st_ctime_ns
    place = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, changed)
    return xxhash.xxh3_128_hexdigest(f"{place} ".encode() + os.fsencode(path.resolve()))


def _digest(file: FileIO, cancelled: Callable[[], bool]) -> str:
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(block):
        if cancelled():
            raise CancelledError
        digest.update(block[:count])
    return digest.hexdigest()


def _open_book(markers: Path, state: str) -> FileIO | None:
    """The one file that may remember this state; None, with a warning, if it cannot be written."""
    try:
        return FileIO(private_folder(markers) / state[:2], "a+", opener=regular)
    except OSError as error:
        _warn(markers, error)
        return None


def _look_up(book: FileIO, state: str) -> str | None:
    """The digest of the file in this state, if remembered; the incomplete line of a killed process is ignored."""
    with suppress(OSError):
        book.seek(0)
        for line in book.readall().split(b"\n"):
            if len(line) == 65 and line.startswith(f"{state} ".encode()):
                return line[33:].decode("ascii", "replace")
    return None


def _warn(markers: Path, error: OSError) -> None:
    if markers not in _warned:
        _warned.add(markers)
        _log.warning(
            f"{markers}: cannot be written ({error.strerror or error}), so shards are compared with their manifest "
            f"again each time they are opened; data.cache.dir sets another folder"
        )
