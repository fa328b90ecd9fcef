"""What lies where in a run directory, and where run directories and their checkpoints lie."""

import os
from pathlib import Path

from vitscale.errors import RecipeError
from vitscale.recipe import Recipe, find_recipe
from vitscale.storage import base_name, is_url, join, without_file_scheme

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.jsonl"
LAUNCH_FILE = "launch.jsonl"
DONE_FILE = "DONE"
LOCK_FILE = ".lock"
NEWEST_FILE = "newest-checkpoint.json"
"""Step and place of the newest checkpoint: that there was one, even where the place is not there any more."""
ANOMALIES_DIR = "anomalies"
CHECKPOINTS = "checkpoints"
INDEX_FILE = "index.json"
"""The last file of each checkpoint."""


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
