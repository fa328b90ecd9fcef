"""The names of a run directory's files, and where run directories and their checkpoints are."""

import os
from pathlib import Path

from vitscale.ground.errors import RecipeError
from vitscale.ground.storage import base_name, is_url, join, without_file_scheme
from vitscale.recipe import Recipe, find_recipe

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.jsonl"
LAUNCH_FILE = "launch.jsonl"
DONE_FILE = "DONE"
VERIFIED_FILE = "verified.json"
LOCK_FILE = ".lock"
SECRET_FILE = ".launch-secret"
NEWEST_FILE = "newest-checkpoint.json"
"""Step and place of the newest checkpoint: records that there was one, even after the place has disappeared."""
ANOMALIES_DIR = "anomalies"
CHECKPOINTS = "checkpoints"
INDEX_FILE = "index.json"  # the file of each checkpoint that is written last


def default_run_dir(recipe: str, *, smoke: bool) -> Path:
    """The run directory unless another is given: below `runs`. Raises `RecipeError` if there is no such recipe."""
    file = find_recipe(recipe)
    if file.stem in (".", ".."):
        raise RecipeError(f"{file}: no run can be called {file.stem!r}; rename the file, or set --run-dir")
    return Path("runs") / f"{file.stem}{'-smoke' if smoke else ''}"


def step_folder(step: int) -> str:
    """The name of one checkpoint's folder."""
    return f"step-{step:08d}"


def checkpoints_root(recipe: Recipe, run_dir: Path) -> str:
    """The path or URL of a run's checkpoints: in its directory, or in `checkpoint.dir` under the directory's name."""
    above = without_file_scheme(recipe.checkpoint.dir or "")
    if not above:
        return str(run_dir / CHECKPOINTS)
    if not is_url(above):
        above = os.path.expanduser(above)  # noqa: PTH111 (without an error where there is no home)
    return join(above, base_name(os.path.realpath(run_dir)))  # the same name through any link
