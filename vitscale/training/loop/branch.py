"""Branches: runs that continue another run, the trunk, after one of its steps under another schedule (`init.continue`).

A branch takes over everything: optimizer, averages, position in the data and what was skipped. If both schedules agree
up to that step, it equals, to the last bit, a run that has had its schedule from the start. The selection stays with
the trunk, whose checkpoints the branch does not have.

Its data are the trunk's or a view of them. A view brings its own order, starting with the first epoch that begins at or
after the trunk's position; all positions before it are the trunk's, or are left out.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.data.shards import Manifest
from vitscale.data.shards.overlap import why_no_view
from vitscale.ground.errors import CheckpointError, DataError, RecipeError, VitscaleError
from vitscale.ground.storage import is_url
from vitscale.recipe import FREE_ON_BRANCHING, Recipe, differences, validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointReader
from vitscale.runs.checkpoint.opening import trained_recipe
from vitscale.runs.checkpoint_index import data_root
from vitscale.training.beginning.found_weights import Named, find_checkpoint, read_found_index
from vitscale.training.beginning.initial_weights import has_begun
from vitscale.training.beginning.run_plan import RunPlan, schedule_in_steps
from vitscale.training.deepspeed import distributed
from vitscale.training.loop.resuming import tell_other_decoder
from vitscale.training.loop.state import changed_data
from vitscale.training.watching.anomalies import AnomalyRecord


def check_branch(recipe: Recipe, plan: RunPlan, run_dir: Path) -> None:
    """Check a branch before the ranks meet; runs that are no branch or have already begun pass.

    Raises `RecipeError` if there is no trunk, or the recipe differs from the trunk's where it must not, and
    `CheckpointError` if the trunk has no such checkpoint, or its data neither equal nor contain the branch's.
    """
    if recipe.init is None or not recipe.init.continues or has_begun(recipe, run_dir):
        return
    named = Named.by_init(recipe.init)
    store, step = find_checkpoint(named)
    if store is None:
        raise _no_run(recipe)
    index = read_found_index(named, store, step)
    _check(recipe, plan, index, validate_recipe(index.recipe, f"the recipe in {store.root}"))


def trunk_checkpoint(
    recipe: Recipe, plan: RunPlan, world: distributed.World, say: Callable[[str], None]
) -> CheckpointReader:
    """The trunk's checkpoint that a branch continues from; all ranks call it together.

    Its index is rewritten for the branch's start: nothing is selected, and `init` identifies the trunk.

    Args:
        say: prints a line for people, on rank 0.

    Raises as `check_branch`, and `CheckpointError` if the checkpoint does not verify.
    """
    assert recipe.init is not None
    store, step = find_checkpoint(Named.by_init(recipe.init), world)
    if store is None or step is None:
        raise _no_run(recipe).on_all_ranks()
    reader = store.open(step)
    trunk = trained_recipe(reader)
    try:
        whole = _check(recipe, plan, reader.index, trunk)
    except VitscaleError as error:
        raise error.on_all_ranks() from None
    say(f"continues from {reader.folder}, step {step:,} of {plan.total_steps:,}, under the schedule of this recipe")
    tell_other_decoder(reader.index, say)
    index = reader.index
    if problem := _other_past(recipe, plan, trunk, index):
        say(f"WARNING: {problem}")
    files = {file.path: file.sha256 for file in index.files}
    identity: dict[str, Any] = {"continues": recipe.init.source, "step": step, "files": files}
    identity |= {"init": index.data.get("init")}
    if whole is not None:
        start = plan.order.next_epoch(index.position)
        identity |= {"data_before": _described(whole, trunk, index.position, start)}
        known = AnomalyRecord.of(index.anomalies)
        left_out = known if start == index.position else known.leaving_out(index.position, start)
        index = replace(index, position=start, anomalies=left_out.state())
        say(
            f"trains on {plan.manifest.where}, {plan.manifest.num_samples:,} of the trunk's {whole.num_samples:,} "
            "samples, starting with a new epoch of these"
        )
    reader.index = replace(index, data=index.data | {"init": identity}, selection={})
    return reader


def _described(whole: Manifest, trunk: Recipe, stop: int, start: int) -> dict[str, Any]:
    """A checkpoint's record of the data before a branch on a view of them; tells later what the run has seen."""
    where = whole.where if is_url(whole.where) else str(Path(whole.where).absolute())
    return {
        "train": trunk.data.train,
        "where": where,
        "manifest_sha256": whole.sha256,
        "stop": stop,  # the trunk's position
        "start": start,  # in the order of the view
    }


def _no_run(recipe: Recipe) -> RecipeError:
    assert recipe.init is not None
    return RecipeError(
        f"init.from: {recipe.init.source} is a file of weights, and has no optimizer state to continue with; "
        "continue: true needs a run's directory, or the folder of one of its checkpoints"
    )


def _check(recipe: Recipe, plan: RunPlan, index: CheckpointIndex, trunk: Recipe) -> Manifest | None:
    """Check a branch against its trunk. Returns the trunk's data if the branch's are a view of them, else None."""
    assert recipe.init is not None
    where = f"init.from: {recipe.init.source}"
    if index.step >= plan.total_steps:
        raise RecipeError(
            f"init.step {index.step:,}: the schedule ends at step {plan.total_steps:,}, so nothing is left to train"
        )
    if changed := differences(trunk.dump(), recipe.dump(), free=FREE_ON_BRANCHING):
        raise RecipeError(
            f"{where} is a run of another recipe; a branch may change only the schedule:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse the trunk's values, or start at step 0 without continue"
        )
    changed = changed_data(index, plan)
    if not changed:
        return None
    whole = _trunk_data(recipe, index, trunk)
    why = "the trunk's data are not found" if whole is None else why_no_view(plan.manifest, whole)
    if whole is None or why is not None or "order_version" in changed:
        raise CheckpointError(
            f"{where} was trained on other data: {', '.join(changed)} of {plan.manifest.where} differ, and it is not "
            f"a view of the trunk's {trunk.data.train}: {why or 'another order'}. Point data.root at the dataset that "
            "it began with"
        )
    return whole


def _trunk_data(recipe: Recipe, index: CheckpointIndex, trunk: Recipe) -> Manifest | None:
    """The trunk's data, searched for by name where the branch's data are and then where the trunk's were."""
    for root in (recipe.data.root, data_root(trunk, index)):
        with suppress(RecipeError, DataError):
            found = Manifest.load(find_dataset(trunk.data.train, root))
            if found.sha256 == index.data.get("manifest_sha256"):
                return found
    return None


def _other_past(recipe: Recipe, plan: RunPlan, trunk: Recipe, index: CheckpointIndex) -> str | None:
    """Where the schedules differ before the branch, in words: then no run with this schedule alone equals it."""
    theirs_has, steps = index.num_samples or plan.manifest.num_samples, index.step
    if trunk.schedule == recipe.schedule and theirs_has == plan.manifest.num_samples:
        return None
    _, theirs = schedule_in_steps(trunk, theirs_has)
    first = next((step for step in range(steps) if theirs(step) != plan.rates(step)), None)
    if first is None:
        return None
    return (
        f"up to step {steps:,} the trunk had another schedule (learning rate {theirs(first).learning_rate:g} at step "
        f"{first + 1:,}, here {plan.rates(first).learning_rate:g}): this run differs from one that follows this "
        "recipe's schedule from step 0"
    )
