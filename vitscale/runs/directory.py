"""A run directory as one launch's own: its lock, whether the run may continue there, and its newest checkpoint."""

import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

import yaml

from vitscale.errors import CheckpointError, RecipeError, StorageError, VitscaleError
from vitscale.files.durable import write_text
from vitscale.files.locks import try_lock
from vitscale.recipe import Recipe, differences, read_recipe
from vitscale.runs.checkpoints import steps_at
from vitscale.runs.done import read_done
from vitscale.runs.names import CHECKPOINTS, LOCK_FILE, NEWEST_FILE, RECIPE_FILE, checkpoints_root
from vitscale.runs.reading import read_object
from vitscale.storage import is_url

_PAUSES = (0.1, 0.5)  # seconds before the second and third try to take a lock


# ---- Which run -------------------------------------------------------------------------------------------------------


def recipe_of_run(run_dir: Path) -> Recipe:
    """The recipe in a run directory, which can be edited; a checkpoint's index has its own, with a checksum.

    Raises `RecipeError` where there is none.
    """
    saved = run_dir / RECIPE_FILE
    if not saved.is_file():
        raise RecipeError(f"{run_dir} is no run directory: there is no {saved.name} in it")
    return read_recipe(saved)


def check_run_dir(recipe: Recipe, run_dir: Path, *, may_resume: bool) -> str | None:
    """What a finished run says of itself, or None where there is something to train.

    Raises `RecipeError` where the directory belongs to a run of another recipe, or to any run when none may be resumed;
    `StorageError` where the folder of its checkpoints is not there.
    """
    saved, root = run_dir / RECIPE_FILE, checkpoints_root(recipe, run_dir)
    if not may_resume and (saved.exists() or _holds_checkpoints(root)):
        raise RecipeError(f"{run_dir if saved.exists() else root} already holds a run; leave out --resume never")
    if not saved.exists():
        if any((run_dir / CHECKPOINTS).glob("step-*")):
            raise RecipeError(f"{run_dir} has checkpoints but no {RECIPE_FILE}: restore it, or use another --run-dir")
        return None
    check_recipe(read_recipe(saved), recipe, str(run_dir))
    done, newest = read_done(run_dir), read_newest(run_dir)
    if done is None and newest is not None and not is_url(root):
        try:
            Path(root).parent.stat()
        except OSError as error:
            raise StorageError(
                f"{root}, where step {newest.step:,} was saved, cannot be reached ({error.strerror}). "
                f"Is its file system mounted?"
            ) from None
    return None if done is None else json.dumps(done, indent=1)


def _holds_checkpoints(root: str) -> bool:
    try:
        return bool(steps_at(root))
    except (OSError, StorageError) as error:
        # For good: where this is repeated, the run may have begun meanwhile.
        raise RecipeError(f"--resume never: whether there are checkpoints already cannot be told: {error}") from None


def check_recipe(began_with: Recipe, recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` where a run that began with one recipe cannot go on with another."""
    changed = differences(began_with.dump(), recipe.dump())
    if changed:
        raise RecipeError(
            f"{where} holds a run of another recipe:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse another --run-dir, or the recipe that this run began with"
        )


# ---- The newest checkpoint that the run knows of ---------------------------------------------------------------------


class Newest(NamedTuple):
    """The newest checkpoint that a run knows of: its step, and the path or URL of all checkpoints."""

    step: int
    place: str


def read_newest(run_dir: Path) -> Newest | None:
    """None where no save has come to its end, or nothing tells."""
    found = read_object(run_dir / NEWEST_FILE) or {}
    try:
        return Newest(int(found["step"]), str(found["place"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def write_newest(run_dir: Path, step: int, root: str) -> None:
    """Note a checkpoint that is there; `root`: path or URL of all of them."""
    newest = Newest(step, root if is_url(root) else os.path.abspath(root))  # noqa: PTH100 (as people know it)
    with suppress(OSError):  # a full disk: the note is one against later mistakes, and not worth a run
        write_text(run_dir / NEWEST_FILE, json.dumps(newest._asdict()) + "\n")


def missing_checkpoints(recipe: Recipe, run_dir: Path, newest: Newest) -> CheckpointError:
    """There is no checkpoint at all, and the run knows of one: it must not begin again without a word."""
    root = checkpoints_root(recipe, run_dir)
    now = root if is_url(root) else os.path.abspath(root)  # noqa: PTH100
    moved = f"none is in {now}, where checkpoint.dir and --run-dir point now"
    return CheckpointError(
        f"{run_dir} has saved step {newest.step:,} in {newest.place}, and "
        f"{'no checkpoint is there any more' if now == newest.place else moved}. Restore the checkpoints, or the "
        f"setting; or begin again in another --run-dir"
    )


# ---- Who writes there ------------------------------------------------------------------------------------------------


def claim(run_dir: Path, recipe: Recipe) -> ExitStack:
    """Take the run directory, and a folder of checkpoints elsewhere, for this launch: two would overwrite each other's.

    Returns what to close in the end. Raises `RecipeError` where another launch has it, OSError.
    """
    held = ExitStack()
    root = checkpoints_root(recipe, run_dir)
    folders = [run_dir] if is_url(root) or Path(root).parent == run_dir else [run_dir, Path(root)]
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        held.enter_context(_locked(folder))
    write_text(run_dir / RECIPE_FILE, yaml.safe_dump(recipe.dump(), sort_keys=False))
    return held


def _locked(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK_FILE).open("a")
    for seconds in (*_PAUSES, None):
        try:
            if try_lock(lock):
                break
        except OSError:
            return lock  # a file system without locks: nothing can be said there
        if seconds is None:
            raise in_use(folder)
        time.sleep(seconds)  # perhaps it is only held by somebody who looks whether we have it
    lock.truncate(0)
    lock.write(socket.gethostname())
    lock.flush()
    return lock


def is_held(run_dir: Path) -> bool | None:
    """Whether a rank holds the lock of a run directory; None where nothing tells.

    A lock that is held on another machine is seen on file systems that know of locks (NFS, Lustre with `flock`), and
    not on others.
    """
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            # There is no asking without taking: it is given back at once, when the file is closed.
            return not try_lock(lock, shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def last_holder(run_dir: Path) -> str:
    """Host of the rank that holds the lock of a run directory, or held it last; nothing where that is not known."""
    with suppress(OSError):
        return (run_dir / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
    return ""


def in_use(folder: Path) -> VitscaleError:
    """That another launch holds the lock of a folder, as the error to raise.

    A machine that has failed may seem to hold its locks for minutes: that is worth a repetition.
    """
    holder = last_holder(folder)
    if holder in ("", socket.gethostname()):
        return RecipeError(f"{folder} is in use by another launch; wait for it, or use another --run-dir")
    return StorageError(f"{folder} is in use by a launch on {holder}. If that machine has failed, its lock goes soon")
