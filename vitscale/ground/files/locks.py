"""File locks by `flock`: the kernel releases those of a process that dies, so none is left behind.

Where the file system has no such locks (NFS without lockd, Lustre without `flock`), an owner file beside a `LockFile`
takes their place: `NAME.owner` for an exclusive lock, `NAME.owner-...` for each shared one. It names its process, and a
thread renews its time. It counts until that process is gone or, if that cannot be seen from here (another machine or
container), until it was not renewed for three minutes. For other files, functions raise OSError there.

On NFS an exclusive lock needs a file that is open for writing, and a shared lock one that is open for reading.
"""

import errno
import fcntl
import os
import re
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from vitscale.ground.storage import regular

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_RENEWED_EVERY_S, _EXPIRES_S = 20.0, 180.0
_POLL_SECONDS = 0.1
_NOTE = re.compile(r"(process [0-9]+ on )?[A-Za-z0-9._-]{0,255}")  # as `LockFile.note` writes it, now or earlier
_OWNER = re.compile(r"(\S+) ([0-9]{1,9}) ([0-9]+)")  # machine, process, its start in clock ticks


class LockFile(FileIO):
    """A file to be locked: created if missing, for this user alone, since whoever can read a file can lock it.

    Closing it releases its lock. Raises OSError, also for a link, and a file that is not regular or has other names.
    """

    _disown: weakref.finalize | None = None  # removes our owner file

    def __init__(self, path: Path, *, create: bool = True) -> None:
        more = os.O_CREAT if create else 0
        super().__init__(path, "r+", opener=lambda path, flags: regular(path, flags | more, 0o600))
        self._path = path
        found = os.fstat(self.fileno())
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:  # of an earlier version
            os.fchmod(self.fileno(), 0o600)

    def close(self) -> None:
        """Close the file and release its lock. Harmless when repeated."""
        self.disown()
        super().close()

    def note(self, holder: str) -> None:
        """Write who holds the lock into the file, unless it holds anything but such a note."""
        if noted(self) or os.fstat(self.fileno()).st_size == 0:
            self.truncate(0)
            os.pwrite(self.fileno(), holder.encode(), 0)

    def own(self, *, shared: bool) -> bool:
        """Lock by an owner file. False if another process holds the lock."""
        alone = Path(f"{self._path}.owner")
        mine = alone.with_name(f"{alone.name}-{secrets.token_hex(4)}") if shared else alone
        try:
            if was_taken := os.path.lexists(mine):
                _take_away(mine)
            with FileIO(mine, "x", opener=regular) as file:
                file.write(f"{_machine()} {os.getpid()} {_started(os.getpid())}".encode())
                if was_taken:  # whoever found the same dead owner may just have taken this one for it, and put it back
                    time.sleep(_POLL_SECONDS)
                others = [alone] if shared else list(mine.parent.glob(f"{mine.name}-*"))
                if os.path.samestat(os.fstat(file.fileno()), mine.stat()) and not any(map(_lives, others)):
                    released = threading.Event()
                    self._disown = weakref.finalize(self, _remove, mine, released, os.getpid())
                    threading.Thread(target=_renew, args=(mine, released), daemon=True).start()
                    return True
            mine.unlink(missing_ok=True)
        except (FileExistsError, FileNotFoundError):  # another process was faster
            pass
        return False

    def disown(self) -> bool:
        """Release a lock by an owner file; False if there is none."""
        disown, self._disown = self._disown, None
        return disown is not None and disown() is None


def noted(file: FileIO) -> str:
    """The note of who holds a lock, or held it last; "" if there is none."""
    text = os.pread(file.fileno(), 1000, 0).decode(errors="replace")
    return text if _NOTE.fullmatch(text) else ""


def lock(file: IO | FileIO, *, shared: bool = False) -> None:
    """Lock an open file, waiting if need be. The lock lasts until `unlock`, or until the file is closed everywhere."""
    while not _flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        time.sleep(_POLL_SECONDS)


def try_lock(file: IO | FileIO, *, shared: bool = False) -> bool:
    """Lock an open file as `lock` does, but return False at once if another process holds it."""
    return _flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def unlock(file: IO | FileIO) -> None:
    """Release the lock, even if forked processes still have the file open."""
    if not (isinstance(file, LockFile) and file.disown()):
        fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether a process holds a file's exclusive lock; False if there is no file. Raises OSError if that is unknown."""
    try:
        with FileIO(path, opener=regular) as file:
            return not try_lock(file, shared=True)  # closing the file releases it at once
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return _lives(Path(f"{path}.owner"))


@contextmanager
def locked(path: Path) -> Iterator[LockFile]:
    """Hold a file's lock exclusively: one thread of one process at a time. Creates the file if missing; it stays."""
    with LockFile(path) as file:
        lock(file)
        yield file


def _flock(file: IO | FileIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS or not isinstance(file, LockFile):
            raise
        return file.own(shared=bool(kind & fcntl.LOCK_SH))
    return True


def _lives(owner: Path) -> bool:
    """Whether the process that made an owner file may still be there; False if there is no such file."""
    try:
        with FileIO(owner, opener=regular) as file:
            text, renewed = file.read(1000) or b"", os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return False
    said = _OWNER.fullmatch(text.decode(errors="replace"))
    if said is not None and said[1] == _machine():
        try:
            os.kill(int(said[2]), 0)
            return _started(int(said[2])) == said[3]
        except ProcessLookupError:
            return False
        except OSError:  # this user may not know
            pass
    now = time.time()
    with suppress(OSError), tempfile.TemporaryFile(dir=owner.parent) as probe:
        now = os.fstat(probe.fileno()).st_mtime  # by the clock that also dates the owner file
    return abs(now - renewed) < _EXPIRES_S  # one of next year was not renewed either


def _machine() -> str:
    """What sets this boot of this machine, and in it this container, apart from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """When a process began, in clock ticks since the machine did; "dead" for one that waits to be reaped."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "dead" if fields[0] in "ZX" else fields[19]


def _take_away(owner: Path) -> None:
    """Remove the file of an owner that is gone. Raises FileExistsError if it is not, FileNotFoundError."""
    aside = owner.with_name(f"{owner.name}.{secrets.token_hex(4)}")
    if _lives(owner):
        raise FileExistsError
    owner.rename(aside)
    if _lives(aside) and not owner.exists():  # it has just become another process's
        aside.rename(owner)
    else:
        aside.unlink()


def _renew(owner: Path, released: threading.Event) -> None:
    while not released.wait(_RENEWED_EVERY_S):
        with suppress(OSError):
            os.utime(owner, follow_symlinks=False)


def _remove(owner: Path, released: threading.Event, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has only a copy of its parent's lock
        released.set()
        owner.unlink(missing_ok=True)
