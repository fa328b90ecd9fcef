"""A launch's claim on a run directory: its lock, whether the run may continue there, and its newest checkpoint."""

import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from vitscale.ground.errors import CheckpointError, RecipeError, StorageError, VitscaleError, os_errors
from vitscale.ground.files.durable import make_folder, remove_leftovers, write_text
from vitscale.ground.files.locks import LockFile, is_locked, noted, try_lock
from vitscale.ground.storage import is_url, regular
from vitscale.recipe import Recipe, differences, read_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.checkpoint_index import steps_at
from vitscale.runs.done import read_done
from vitscale.runs.names import CHECKPOINTS, LOCK_FILE, NEWEST_FILE, RECIPE_FILE, checkpoints_root
from vitscale.runs.reading import read_object

_PAUSES = (0.1, 0.5)  # seconds before the second and third try to take a lock


def recipe_of_run(run_dir: Path) -> Recipe:
    """A run directory's recipe, which people can edit, unlike a checkpoint's. Raises `RecipeError` without one."""
    saved = run_dir / RECIPE_FILE
    with os_errors(f"{str(run_dir)[:100]} cannot be read", RecipeError):
        if not saved.is_file():
            what = f"it has no {saved.name}" if run_dir.is_dir() else "there is no such directory"
            raise RecipeError(f"{run_dir} is not a run directory: {what}")
    return read_recipe(saved)


def check_run_dir(recipe: Recipe, run_dir: Path, *, may_resume: bool) -> str | None:
    """The summary of a finished run, as JSON, or None if there is something left to train.

    Raises `RecipeError` if the directory belongs to a run of another recipe, or to any run when none may be resumed;
    `StorageError` if the folder of its checkpoints cannot be reached.
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
        what = f"{root}, where step {newest.step:,} was saved, cannot be reached. Is its file system mounted?"
        with os_errors(what, StorageError):
            Path(root).parent.stat()
    return None if done is None else json.dumps(done, indent=1)


def _holds_checkpoints(root: str) -> bool:
    try:
        return bool(steps_at(root))
    except (OSError, StorageError) as error:
        # Not an error that is retried: by the next try this launch itself may have begun the run.
        raise RecipeError(f"--resume never: cannot find out whether there are checkpoints already: {error}") from None


def check_recipe(began_with: Recipe, recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` if a run that began with one recipe would continue with a different one."""
    changed = differences(began_with.dump(), recipe.dump())
    if changed:
        raise RecipeError(
            f"{where} holds a run of another recipe:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse the recipe that this run started with, or another --run-dir: a new run can begin with this one's "
            "weights (init.from), or continue after one of its steps with another schedule (init.continue); see "
            "docs/training.md"
        )


class Newest(NamedTuple):
    """The newest checkpoint that a run has noted: its step, and the path or URL of the folder of all checkpoints."""

    step: int
    place: str


def read_newest(run_dir: Path) -> Newest | None:
    """The newest checkpoint that the run has noted; None if no save was completed, or the note cannot be read."""
    note = read_object(run_dir / NEWEST_FILE) or {}
    with suppress(ValueError, KeyError, TypeError, OverflowError):
        return Newest(int(note["step"]), str(note["place"]))
    return None


def write_newest(run_dir: Path, step: int, root: str) -> None:
    """Note a completed checkpoint; `root` is the path or URL of the folder of all checkpoints."""
    newest = Newest(step, root if is_url(root) else os.path.abspath(root))  # noqa: PTH100 (as people know it)
    with suppress(OSError):  # a full disk: the note only guards against later mistakes, and is not worth losing a run
        write_text(run_dir / NEWEST_FILE, json.dumps(newest._asdict()) + "\n")


def missing_checkpoints(recipe: Recipe, run_dir: Path, newest: Newest) -> CheckpointError:
    """The error to raise if the run has noted a checkpoint and none is there: it must not silently start over."""
    root = checkpoints_root(recipe, run_dir)
    now = root if is_url(root) else os.path.abspath(root)  # noqa: PTH100
    moved = f"none is in {now}, where checkpoint.dir and --run-dir point now"
    return CheckpointError(
        f"{run_dir} has saved step {newest.step:,} in {newest.place}, and "
        f"{'no checkpoint is there any more' if now == newest.place else moved}. Restore the checkpoints, or the "
        f"setting; or begin again in another --run-dir"
    )


def claim(run_dir: Path, recipe: Recipe) -> ExitStack:
    """Lock the run directory, and its folder of checkpoints if that is elsewhere, and write the recipe there.

    Without the lock two launches would overwrite each other's files. Close what is returned to release it. Raises
    `RecipeError`, or `StorageError` for another machine, if another launch has the lock; OSError.
    """
    locks, root = ExitStack(), checkpoints_root(recipe, run_dir)
    folders = [run_dir] if is_url(root) or Path(root).parent == run_dir else [run_dir, Path(root)]
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        locks.enter_context(_locked(folder))
    remove_leftovers(run_dir)
    write_text(run_dir / RECIPE_FILE, dump_yaml(recipe.dump()))
    return locks


def _locked(folder: Path) -> LockFile:
    make_folder(folder)
    lock = LockFile(folder / LOCK_FILE)
    for seconds in (*_PAUSES, None):
        if try_lock(lock):
            break
        if seconds is None:
            raise in_use(folder)
        time.sleep(seconds)  # it may be held only for a moment, by `is_held` in another process
    lock.note(socket.gethostname())
    return lock


def is_held(run_dir: Path) -> bool | None:
    """Whether a rank holds the lock of a run directory; None if that cannot be known.

    A lock held on another machine is visible, unless it is only locked there (Lustre with `localflock`).
    """
    with suppress(OSError):  # such as another user's
        return is_locked(run_dir / LOCK_FILE)
    return None


def last_holder(run_dir: Path) -> str:
    """The host of the rank that holds the lock of a run directory, or held it last; "" if that is not known."""
    with suppress(OSError), FileIO(run_dir / LOCK_FILE, opener=regular) as lock:
        return noted(lock)
    return ""


def in_use(folder: Path) -> VitscaleError:
    """The error to raise if another launch holds the lock of a folder.

    It is a `StorageError`, which is retried, if another machine holds the lock: a failed machine may seem to hold its
    locks for minutes. Otherwise it is a `RecipeError`.
    """
    holder = last_holder(folder)
    if holder in ("", socket.gethostname()):
        return RecipeError(f"{folder} is in use by another launch; wait for it, or use another --run-dir")
    return StorageError(
        f"{folder} is in use by a launch on {holder}. If that machine has failed, its lock expires soon"
    )
