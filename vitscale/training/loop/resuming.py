"""Finds the checkpoint that a run continues from, and checks that it can."""

from collections.abc import Callable
from pathlib import Path

from vitscale.ground.errors import CheckpointError
from vitscale.ground.native import libjpeg_turbo_version
from vitscale.ground.ranks import on_rank_zero
from vitscale.recipe import Recipe
from vitscale.runs import directory as run_directory
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointReader
from vitscale.runs.checkpoint.opening import trained_recipe
from vitscale.runs.names import DONE_FILE, METRICS_FILE
from vitscale.training.beginning.run_plan import RunPlan
from vitscale.training.loop.saves import Saves
from vitscale.training.loop.state import changed_data


def checkpoint_to_resume(
    recipe: Recipe, plan: RunPlan, run_dir: Path, saves: Saves, say: Callable[[str], None]
) -> CheckpointReader | None:
    """The newest checkpoint of this run, or None if it begins; all ranks call it together.

    Raises `CheckpointError` and `RecipeError` if the run began on other data or with another recipe, and as
    `newest_checkpoint`.
    """
    if (run_dir / DONE_FILE).exists():
        say(f"WARNING: {run_dir / DONE_FILE} is damaged and ignored")
    reader = newest_checkpoint(recipe, run_dir, saves, say)
    if reader is not None:
        _check_same_data(reader.index, plan, saves.store.root)
        run_directory.check_recipe(trained_recipe(reader), recipe, f"{reader.folder}")
        tell_other_decoder(reader.index, say)
    elif (run_dir / METRICS_FILE).exists():
        say(f"WARNING: {run_dir} holds a run without a checkpoint: it begins again at step 0")
    return reader


def newest_checkpoint(
    recipe: Recipe, run_dir: Path, saves: Saves, say: Callable[[str], None]
) -> CheckpointReader | None:
    """The newest checkpoint that verifies; None if the run has never saved. All ranks call it together.

    Raises `CheckpointError` if there was one and none is left, and `StorageError`.
    """
    reader = saves.store.newest(lambda problem: say(f"WARNING: {problem}"))
    noted = on_rank_zero(lambda: run_directory.read_newest(run_dir))
    known = None if noted is None else run_directory.Newest(*noted)
    if reader is None and known is not None:
        raise run_directory.missing_checkpoints(recipe, run_dir, known).on_all_ranks()
    if reader is not None and known is not None and reader.index.step < known.step:
        say(f"WARNING: step {known.step:,} was saved, but is missing or unusable")
    if reader is not None and saves.store.rank == 0:
        run_directory.write_newest(run_dir, reader.index.step, saves.store.root)
    return reader


def tell_other_decoder(index: CheckpointIndex, say: Callable[[str], None]) -> None:
    """Warn if the images so far were decoded by another version of the library."""
    ours = libjpeg_turbo_version()
    decoder = index.versions.get("libjpeg_turbo", ours)
    if decoder != ours:
        say(
            f"WARNING: images were decoded by libjpeg-turbo {decoder} so far, and are decoded by {ours} "
            "from now on: pixels may differ in their last bits"
        )


def _check_same_data(index: CheckpointIndex, plan: RunPlan, where: str) -> None:
    if changed := changed_data(index, plan):
        raise CheckpointError(
            f"{where}: this run was started on other data: {', '.join(changed)} of {plan.manifest.where} differ from "
            "the checkpoint's. Point data.root at that dataset, or start over in another --run-dir"
        ).on_all_ranks()
