"""What lies where in a run directory. No torch, so that what only looks at a run starts at once."""

from pathlib import Path

from vitscale.recipe import find_recipe

RECIPE_FILE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
DONE_FILE = "DONE"
LAUNCH_FILE = "launch.jsonl"
INDEX_FILES = f"{CHECKPOINTS}/step-*/index.json"
"""Pattern of the last file of each checkpoint; of those in the run directory."""


def default_run_dir(recipe: str, *, smoke: bool) -> Path:
    """Where a run is when nothing else is said. Raises `RecipeError` where there is no such recipe."""
    return Path("runs") / f"{find_recipe(recipe).stem}{'-smoke' if smoke else ''}"


def newest_checkpoint_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint in the run directory, whether or not it verifies; 0 for none."""
    names = (path.parent.name.removeprefix("step-") for path in run_dir.glob(INDEX_FILES))
    return max((int(name) for name in names if name.isdecimal()), default=0)
