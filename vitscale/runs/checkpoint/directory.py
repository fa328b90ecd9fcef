"""The directory of a run's checkpoints: a folder on a file system that all ranks share, or a URL.

`LocalDirectory` and `RemoteDirectory` have the same methods, and so have the files of one checkpoint in each. Their
docstrings, in the local classes, say which ranks call them; `CheckpointStore` coordinates the ranks. If the directory
cannot be reached or written, which says nothing about its checkpoints, methods raise OSError, StorageError or
RecipeError (the package for this kind of URL is missing); if a checkpoint is missing or damaged, CheckpointError.
"""

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from vitscale.ground.errors import CheckpointError, RecipeError
from vitscale.ground.files.durable import make_folder, remove_leftovers, rename, write_text
from vitscale.ground.files.fetching import Promise, WrongContentError, fetch, with_pauses
from vitscale.ground.files.locks import locked, noted
from vitscale.ground.files.machine_folder import MachineFolder
from vitscale.ground.storage import PATTERNS, is_url, join, names_in, put, read_bytes, remove, remove_folder
from vitscale.ground.wording import quoted
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint.format import Fragment, verify_file, write_rank_file
from vitscale.runs.checkpoint_index import (
    CheckpointIndex,
    FileEntry,
    index_text,
    parse_index,
    read_index,
    steps_among,
    steps_at,
)
from vitscale.runs.names import INDEX_FILE, checkpoints_root, step_folder

_SET_ASIDE = "unusable-index.json"
_LEFT = re.compile(r"\.(building|deleting)-step-[0-9]{8,}(\.[0-9a-f]{8})?")
_NAME = r"(rank-[0-9]{5,}\.safetensors|index\.json)"
_FILE = re.compile(rf"{_NAME}|\.{_NAME}\.[0-9a-f]{{8}}\.part")
_Result = TypeVar("_Result")


class LocalFiles:
    """The files of a checkpoint in a folder, whose path or URL is `where`. Any rank may call any method."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder

    def verified(self, entry: FileEntry) -> Path:
        """The file's path on this machine, after all its bytes were verified: now, or when it was copied here."""
        path = self.path(entry)
        verify_file(path, entry)
        return path

    def path(self, entry: FileEntry) -> Path:
        """The file's path on this machine, without verifying it: some rank must have done that."""
        path = self._folder / entry.path
        with suppress(OSError):  # if it is missing, whoever opens it says so
            if not S_ISREG(path.lstat().st_mode):
                raise CheckpointError(f"{path}: is not a regular file of its own; expected no link, pipe or folder")
        return path

    def release(self) -> None:
        """Remove the copies on this machine. Paths returned before must not be used any more."""


class LocalDirectory:
    """A folder of checkpoints; `root` is its path, or URL.

    A checkpoint is built under a hidden name and renamed when it is complete, so that a final name always means a
    complete checkpoint. `index.json` verifies it again, also for file systems on which a rename is not atomic.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._root = root

    def _folder(self, step: int, prefix: str = "") -> Path:
        return self._root / f"{prefix}{step_folder(step)}"

    def _building(self, step: int) -> Path:
        return self._folder(step, ".building-")

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first; not yet verified."""
        return steps_at(self.root)

    def tidy(self) -> None:
        """One rank: remove what killed processes left behind, and note the newest checkpoint. Raises OSError."""
        steps = self.steps()
        for folder in (self._root, *map(self._folder, steps)):
            remove_leftovers(folder)
        if steps:
            self._note_latest(steps[-1])
        for left in self._root.iterdir() if self._root.exists() else ():
            if _LEFT.fullmatch(left.name):
                _remove_files(left)

    def _note_latest(self, step: int) -> None:
        latest, name = self._root / "latest", step_folder(step) + "\n"
        with suppress(OSError):  # a hint for people
            if not latest.is_file() or latest.stat().st_size != len(name) or latest.read_text(errors="replace") != name:
                write_text(latest, name)

    def begin(self, step: int) -> None:
        """One rank: remove what interrupted saves left behind, and prepare for `write`."""
        make_folder(self._root)
        self.tidy()
        self._building(step).mkdir()

    def write(self, step: int, name: str, fragments: list[Fragment]) -> FileEntry:
        """Every rank: write its own file, under its own name; if that fails, nothing of it is left."""
        return write_rank_file(self._building(step) / name, fragments)

    def finish(self, index: CheckpointIndex) -> None:
        """One rank: turn the files, once all are written, into a checkpoint, replacing one of the same step."""
        building, final = self._building(index.step), self._folder(index.step)
        write_text(building / INDEX_FILE, index_text(index))
        self.remove(index.step)
        rename(building, final)
        self._note_latest(index.step)

    def abandon(self, step: int) -> None:
        """One rank, in place of `finish`: remove what was written. Raises nothing."""
        _remove_files(self._building(step))

    def files(self, step: int) -> LocalFiles:
        """The files of a checkpoint. Raises nothing."""
        return LocalFiles(self._folder(step))

    def read_index(self, step: int) -> CheckpointIndex:
        return read_index(self._folder(step), step)

    def write_index(self, index: CheckpointIndex) -> None:
        """One rank: replace the index of a checkpoint."""
        write_text(self._folder(index.step) / INDEX_FILE, index_text(index))

    def set_aside(self, step: int) -> None:
        """One rank: make a checkpoint no longer count as one, but leave its files for a person to look at."""
        aside = self._folder(step, ".unusable-")
        _remove_files(aside)
        self._folder(step).rename(aside)

    def remove(self, step: int) -> None:
        """One rank: remove a checkpoint if it exists; a removal that is interrupted leaves no damaged checkpoint."""
        folder, token = self._folder(step), secrets.token_hex(4)  # an earlier trash may hold another's files
        if folder.exists():
            trash = self._root / f".deleting-{folder.name}.{token}"
            folder.rename(trash)
            _remove_files(trash)


def _remove_files(folder: Path) -> None:
    """Remove what this module wrote into a folder, and the folder if nothing else is in it. Never follows a link."""
    with suppress(OSError):
        if folder.is_symlink():
            return folder.unlink()
        for path in folder.iterdir():
            if _FILE.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


class RemoteFiles:
    """The files of a checkpoint at a URL: each is fetched when first needed, once for all ranks of a machine."""

    def __init__(self, where: str, machine: Path) -> None:
        self.where = where
        self._machine = machine
        self._folder: MachineFolder | None = None

    def verified(self, entry: FileEntry) -> Path:
        if self._folder is None:
            self._folder = MachineFolder(self._machine, hashlib.sha256(self.where.encode()).hexdigest()[:16])
        path = self._folder.path / entry.sha256  # right even if the checkpoint was replaced
        with locked(path.with_suffix(".lock")) as lock:
            if (state := _state(path)) is None or state != noted(lock):  # missing, or not verified as it is now
                _fetch(join(self.where, entry.path), entry, path)
                lock.note(str(_state(path)))
        return path

    path = verified

    def release(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.release()


class RemoteDirectory:
    """Checkpoints below a URL, where nothing can be renamed.

    Files are written under their final names; `index.json`, which makes them a checkpoint, is written last and removed
    first. Ranks write their files to this machine before they upload them, and read them from copies on this machine,
    in `vitscale-checkpoints` below the folder `cache`.
    """

    def __init__(self, root: str, cache: Path) -> None:
        self.root = root.rstrip("/")
        if found := PATTERNS & set(self.root):  # what they match is removed, and may be anybody's
            raise RecipeError(f"checkpoints at {root}: a file system reads {quoted(found, 3)} as a pattern; rename it")
        self._machine = cache / "vitscale-checkpoints"

    def _url(self, step: int, name: str = "") -> str:
        folder = join(self.root, step_folder(step))
        return join(folder, name) if name else folder

    def _upload(self, step: int, name: str, write: Callable[[Path], _Result]) -> _Result:
        """Upload what `write` writes to a path on this machine; returns its result."""
        with MachineFolder(self._machine, f"upload-{secrets.token_hex(4)}") as folder:
            result = write(folder.path / name)
            put(folder.path / name, self._url(step, name))
        return result

    def steps(self) -> list[int]:
        return steps_at(self.root)

    def begin(self, step: int) -> None:
        for other in steps_among(names_in(self.root)):
            if not {INDEX_FILE, _SET_ASIDE} & set(names_in(self._url(other))):
                remove_folder(self._url(other))
        self.remove(step)

    def write(self, step: int, name: str, fragments: list[Fragment]) -> FileEntry:
        return self._upload(step, name, lambda path: write_rank_file(path, fragments))

    def finish(self, index: CheckpointIndex) -> None:
        self.write_index(index)

    def abandon(self, step: int) -> None:
        with suppress(Exception):  # every file system has its own exceptions; `begin` tries again
            self.remove(step)

    def files(self, step: int) -> RemoteFiles:
        return RemoteFiles(self._url(step), self._machine)

    def read_index(self, step: int) -> CheckpointIndex:
        url = self._url(step, INDEX_FILE)

        def read() -> CheckpointIndex:
            try:
                return parse_index(read_bytes(url), url, step)
            except FileNotFoundError:
                raise CheckpointError(f"{url}: missing, so this checkpoint was never finished") from None

        return with_pauses(read, CheckpointError)

    def write_index(self, index: CheckpointIndex) -> None:
        self._upload(index.step, INDEX_FILE, lambda path: path.write_bytes(index_text(index).encode()))

    def set_aside(self, step: int) -> None:
        content = read_bytes(self._url(step, INDEX_FILE))
        self._upload(step, _SET_ASIDE, lambda path: path.write_bytes(content))
        remove(self._url(step, INDEX_FILE))

    def remove(self, step: int) -> None:
        remove(self._url(step, INDEX_FILE))
        remove_folder(self._url(step))


def _state(path: Path) -> str | None:
    """What changes when a file is replaced or written to; None if there is none."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        return f"{found.st_mode}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
    return None


def _fetch(url: str, entry: FileEntry, path: Path) -> None:
    """Copy a file to this machine; it gets its final name only once its digest is verified."""
    part = path.with_suffix(".part")
    promise = Promise(entry.bytes, "sha256", entry.sha256, "the index")
    with part.open("wb") as file:

        def write(piece: bytes, position: int) -> None:
            file.seek(position)
            file.write(piece)

        try:
            fetch(url, promise, hashlib.sha256, write)
        except WrongContentError as error:
            part.unlink()
            raise CheckpointError(str(error)) from None
        except FileNotFoundError:
            raise CheckpointError(f"{url}: {os.strerror(errno.ENOENT)}") from None
    part.rename(path)


Directory = LocalDirectory | RemoteDirectory
Files = LocalFiles | RemoteFiles


def checkpoint_directory(recipe: Recipe, run_dir: Path) -> Directory:
    """The directory of a run's checkpoints, as its recipe says."""
    root = checkpoints_root(recipe, run_dir)
    return RemoteDirectory(root, recipe.data.cache.folder()) if is_url(root) else LocalDirectory(Path(root))
