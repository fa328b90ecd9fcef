"""The directory of a run: whose it is, and that only one launch at a time writes there."""

import fcntl
import time
from pathlib import Path
from typing import IO, Any

import yaml

from vitscale.durable import write_text
from vitscale.errors import RecipeError
from vitscale.recipe import Recipe, differences, read_recipe
from vitscale.run_directory import CHECKPOINTS, DONE_FILE, RECIPE_FILE

_PAUSES = (0.1, 0.5)


def check_run_dir(recipe: Recipe, run_dir: Path, *, may_resume: bool) -> str | None:
    """What a finished run says of itself, or None where there is something to train.

    Raises `RecipeError` where the directory belongs to a run of another recipe, or to any run when none may be resumed.
    """
    saved, done = run_dir / RECIPE_FILE, run_dir / DONE_FILE
    if not saved.exists():
        if any((run_dir / CHECKPOINTS).glob("step-*")):
            raise RecipeError(f"{run_dir} has checkpoints but no {RECIPE_FILE}: restore it, or use another --run-dir")
        return None
    if not may_resume:
        raise RecipeError(f"{run_dir} already holds a run; leave out --resume never to continue it")
    check_recipe(read_recipe(saved).dump(), recipe, str(run_dir))
    try:
        return done.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecipeError(f"{done} cannot be read: {error.strerror}") from None


def check_recipe(began_with: dict[str, Any], recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` where a run that began with one dumped recipe cannot go on with another."""
    changed = differences(began_with, recipe.dump())
    if changed:
        raise RecipeError(
            f"{where} holds a run of another recipe:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse another --run-dir, or the recipe that this run began with"
        )


def claim(run_dir: Path, recipe: Recipe) -> IO[str]:
    """Take the run directory for this launch: two in one would overwrite each other's checkpoints.

    Returns what to close in the end. Raises `RecipeError` where another launch has it, OSError.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / ".lock").open("w")
    for seconds in (*_PAUSES, None):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # perhaps only by somebody who looks whether we have it
            if seconds is None:
                what = f"{run_dir} is in use by another launch; wait for it, or use another --run-dir"
                raise RecipeError(what) from None
            time.sleep(seconds)
        except OSError:
            break  # a file system without locks: nothing can be said there
    write_text(run_dir / RECIPE_FILE, yaml.safe_dump(recipe.dump(), sort_keys=False))
    return lock
