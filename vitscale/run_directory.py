"""What lies where in a run directory. No torch, so that what only looks at a run starts at once."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitscale.errors import RecipeError, StorageError, VitscaleError
from vitscale.files.locks import try_lock
from vitscale.recipe import Recipe, find_recipe
from vitscale.storage import base_name, is_url, join, without_file_scheme

RECIPE_FILE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
DONE_FILE = "DONE"
LAUNCH_FILE = "launch.jsonl"
LOCK_FILE = ".lock"
NEWEST_FILE = "newest-checkpoint.json"
"""Step and place of the newest checkpoint: that there was one, even where the place is not there any more."""
ANOMALIES_DIR = "anomalies"
INDEX_FILES = f"{CHECKPOINTS}/step-*/index.json"
"""Pattern of the last file of each checkpoint; of those in the run directory."""


def default_run_dir(recipe: str, *, smoke: bool) -> Path:
    """Where a run is when nothing else is said: below `runs`. Raises `RecipeError` where there is no such recipe."""
    file = find_recipe(recipe)
    if file.stem in (".", ".."):
        raise RecipeError(f"{file}: no run can be called {file.stem!r}; rename the file, or say --run-dir")
    return Path("runs") / f"{file.stem}{'-smoke' if smoke else ''}"


def step_folder(step: int) -> str:
    """Name of the folder of one checkpoint."""
    return f"step-{step:08d}"


def checkpoints_root(recipe: Recipe, run_dir: Path) -> str:
    """Path or URL of a run's checkpoints: in its directory, or in `checkpoint.dir` under the directory's name."""
    above = without_file_scheme(recipe.checkpoint.dir or "")
    if not above:
        return str(run_dir / CHECKPOINTS)
    if not is_url(above):
        above = os.path.expanduser(above)  # noqa: PTH111 (without an error where there is no home)
    return join(above, base_name(os.path.realpath(run_dir)))  # by whatever link the directory is reached


def read_done(run_dir: Path) -> dict[str, Any] | None:
    """What a finished run says of itself; None where it is not finished, or what it says is damaged."""
    try:
        found = json.loads((run_dir / DONE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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


def newest_checkpoint_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint in the run directory, whether or not it verifies; 0 for none."""
    names = (path.parent.name.removeprefix("step-") for path in run_dir.glob(INDEX_FILES))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def in_use(folder: Path) -> VitscaleError:
    """That another launch holds the lock of a folder, as the error to raise.

    A machine that has failed may seem to hold its locks for minutes: that is worth a repetition.
    """
    holder = last_holder(folder)
    if holder in ("", socket.gethostname()):
        return RecipeError(f"{folder} is in use by another launch; wait for it, or use another --run-dir")
    return StorageError(f"{folder} is in use by a launch on {holder}. If that machine has failed, its lock goes soon")
