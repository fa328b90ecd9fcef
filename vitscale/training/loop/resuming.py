"""The checkpoint that a run continues from: its own, or for a branch that of another run, the trunk (`init.continue`).

A branch continues a step of its trunk under another schedule. It takes over everything: optimizer, averages, position
in the data and what was skipped. If both schedules agree up to that step, it equals, to the last bit, a run that has
had its schedule from the start. The selection stays with the trunk, whose checkpoints the branch does not have.

Its data are the trunk's or a view of them. A view brings its own order, starting with the first epoch that begins at or
after the trunk's position; all positions before it are the trunk's, or are left out.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.data.shards import Manifest
from vitscale.data.shards.info import why_no_view
from vitscale.ground.errors import CheckpointError, DataError, RecipeError, VitscaleError
from vitscale.ground.native import libjpeg_turbo_version
from vitscale.ground.ranks import on_rank_zero, write_on_rank_zero
from vitscale.ground.storage import is_url
from vitscale.recipe import FREE_ON_BRANCHING, Init, Recipe, differences, validate_recipe
from vitscale.recipe.datasets import find_dataset
from vitscale.runs import directory as run_directory
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointReader, CheckpointStore
from vitscale.runs.checkpoint.opening import trained_recipe
from vitscale.runs.checkpoint_index import data_root
from vitscale.runs.names import DONE_FILE, METRICS_FILE, RECIPE_FILE
from vitscale.training.beginning.found_weights import find_checkpoint, read_found_index
from vitscale.training.beginning.initial_weights import has_begun
from vitscale.training.beginning.run_plan import RunPlan, schedule_in_steps
from vitscale.training.deepspeed.distributed import World
from vitscale.training.loop.state import changed_data
from vitscale.training.optimizers.schedule import Rates
from vitscale.training.watching.anomalies import AnomalyRecord


class Claim:
    """A launch's claim on its run directory, so that no second launch writes there.

    Rank 0 holds it until `close` for all ranks, which make it together. Raises `RecipeError` if another launch has the
    directory.
    """

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self._run_dir, self._recipe = run_dir, recipe
        self._lock = ExitStack()
        write_on_rank_zero(self._take, run_dir)

    def _take(self) -> None:
        self._lock = run_directory.claim(self._run_dir, self._recipe)

    def renew(self) -> bool:
        """Restore the directory if it was moved or deleted, so that the repeated command finds a run in it.

        Called on rank 0 only. Returns whether it was restored.
        """
        if (self._run_dir / RECIPE_FILE).exists():
            return False
        self.close()
        with suppress(OSError, VitscaleError):  # the next save will report it
            self._take()
            return True
        return False

    def close(self) -> None:
        self._lock.close()


def checkpoint_to_resume(
    plan: RunPlan, run_dir: Path, store: CheckpointStore, say: Callable[[str], None]
) -> CheckpointReader | None:
    """The newest checkpoint of this run, or None if it begins; all ranks call it together.

    Raises `CheckpointError` and `RecipeError` if the run began on other data or with another recipe, and as
    `newest_checkpoint`.
    """
    if (run_dir / DONE_FILE).exists():
        say(f"WARNING: {run_dir / DONE_FILE} is damaged and ignored")
    reader = newest_checkpoint(plan.recipe, run_dir, store, say)
    if reader is not None:
        if changed := changed_data(reader.index, plan):
            raise CheckpointError(
                f"{store.root}: this run was started on other data: {', '.join(changed)} of {plan.manifest.where} "
                "differ from the checkpoint's. Point data.root at that dataset, or start over in another --run-dir"
            ).on_all_ranks()
        run_directory.check_recipe(trained_recipe(reader), plan.recipe, f"{reader.folder}")
        _warn_of_other_decoder(reader.index, say)
    elif (run_dir / METRICS_FILE).exists():
        say(f"WARNING: {run_dir} holds a run without a checkpoint: it begins again at step 0")
    return reader


def newest_checkpoint(
    recipe: Recipe, run_dir: Path, store: CheckpointStore, say: Callable[[str], None]
) -> CheckpointReader | None:
    """The newest checkpoint that verifies; None if the run has never saved. All ranks call it together.

    Raises `CheckpointError` if there was one and none is left, and `StorageError`.
    """
    reader = store.newest(lambda problem: say(f"WARNING: {problem}"))
    noted = on_rank_zero(lambda: run_directory.read_newest(run_dir))
    known = None if noted is None else run_directory.Newest(*noted)
    if reader is None and known is not None:
        raise run_directory.missing_checkpoints(recipe, run_dir, known).on_all_ranks()
    if reader is not None and known is not None and reader.index.step < known.step:
        say(f"WARNING: step {known.step:,} was saved, but is missing or unusable")
    if reader is not None and store.rank == 0:
        run_directory.write_newest(run_dir, reader.index.step, store.root)
    return reader


def _warn_of_other_decoder(index: CheckpointIndex, say: Callable[[str], None]) -> None:
    ours = libjpeg_turbo_version()
    decoder = index.versions.get("libjpeg_turbo", ours)
    if decoder != ours:
        say(
            f"WARNING: images were decoded by libjpeg-turbo {decoder} so far, and are decoded by {ours} "
            "from now on: pixels may differ in their last bits"
        )


def check_branch(plan: RunPlan, run_dir: Path) -> None:
    """Check a branch before the ranks meet; runs that are no branch or have already begun pass.

    Raises `RecipeError` if there is no trunk, or the recipe differs from the trunk's where it must not, and
    `CheckpointError` if the trunk has no such checkpoint, or its data neither equal nor contain the branch's.
    """
    init = plan.recipe.init
    if init is None or not init.continues or has_begun(plan.recipe, run_dir):
        return
    store, step = find_checkpoint(init)
    if store is None:
        raise _no_run(init)
    index = read_found_index(init, store, step)
    _check(plan, init, index, validate_recipe(index.recipe, f"the recipe in {store.root}"))


def trunk_checkpoint(plan: RunPlan, world: World, say: Callable[[str], None]) -> CheckpointReader:
    """The trunk's checkpoint that a branch continues from; all ranks call it together.

    Its index is rewritten for the branch's start: nothing is selected, and `init` identifies the trunk.

    Raises as `check_branch`, and `CheckpointError` if the checkpoint does not verify.
    """
    init = plan.recipe.init
    assert init is not None
    store, step = find_checkpoint(init, world)
    if store is None or step is None:
        raise _no_run(init).on_all_ranks()
    reader = store.open(step)
    trunk, index = trained_recipe(reader), reader.index
    try:
        whole = _check(plan, init, index, trunk)
    except VitscaleError as error:
        raise error.on_all_ranks() from None
    say(f"continues from {reader.folder}, step {step:,} of {plan.total_steps:,}, under the schedule of this recipe")
    _warn_of_other_decoder(index, say)
    if problem := _other_past(plan, trunk, index):
        say(f"WARNING: {problem}")
    files = {file.path: file.sha256 for file in index.files}
    identity: dict[str, Any] = {"continues": init.source, "step": step, "files": files, "init": index.data.get("init")}
    if whole is not None:
        start = plan.order.next_epoch(index.position)
        identity["data_before"] = {  # tells later what the run has seen
            "train": trunk.data.train,
            "where": whole.where if is_url(whole.where) else str(Path(whole.where).absolute()),
            "manifest_sha256": whole.sha256,
            "stop": index.position,  # the trunk's position
            "start": start,  # in the order of the view
        }
        known = AnomalyRecord.of(index.anomalies)
        left_out = known if start == index.position else known.leaving_out(index.position, start)
        index = replace(index, position=start, anomalies=left_out.state())
        say(
            f"trains on {plan.manifest.where}, {plan.manifest.num_samples:,} of the trunk's {whole.num_samples:,} "
            "samples, starting with a new epoch of these"
        )
    reader.index = replace(index, data=index.data | {"init": identity}, selection={})
    return reader


def _no_run(init: Init) -> RecipeError:
    return RecipeError(
        f"init.from: {init.source} is a file of weights, and has no optimizer state to continue with; "
        "continue: true needs a run's directory, or the folder of one of its checkpoints"
    )


def _check(plan: RunPlan, init: Init, index: CheckpointIndex, trunk: Recipe) -> Manifest | None:
    """Check a branch against its trunk. Returns the trunk's data if the branch's are a view of them, else None."""
    where = f"init.from: {init.source}"
    if index.step >= plan.total_steps:
        raise RecipeError(
            f"init.step {index.step:,}: the schedule ends at step {plan.total_steps:,}, so nothing is left to train"
        )
    if changed := differences(trunk.dump(), plan.recipe.dump(), free=FREE_ON_BRANCHING):
        raise RecipeError(
            f"{where} is a run of another recipe; a branch may change only the schedule:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nUse the trunk's values, or start at step 0 without continue"
        )
    changed = changed_data(index, plan)
    if not changed:
        return None
    whole = _trunk_data(plan.recipe, index, trunk)
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
            manifest = Manifest.load(find_dataset(trunk.data.train, root))
            if manifest.sha256 == index.data.get("manifest_sha256"):
                return manifest
    return None


def _other_past(plan: RunPlan, trunk: Recipe, index: CheckpointIndex) -> str | None:
    """Where the schedules differ before the branch, in words: then no run with this schedule alone equals it."""
    num_samples, steps = index.num_samples or plan.manifest.num_samples, index.step
    if trunk.schedule == plan.recipe.schedule and num_samples == plan.manifest.num_samples:
        return None
    _, theirs = schedule_in_steps(trunk, num_samples)
    first = next((step for step in range(steps) if theirs(step) != plan.rates(step)), None)
    if first is None:
        return None
    pairs = zip(Rates._fields, theirs(first), plan.rates(first), strict=True)
    name, was, now = next((name.replace("_", " "), was, now) for name, was, now in pairs if was != now)
    before, here = (f"{value:g}" if isinstance(value, float) else value for value in (was, now))
    return (
        f"up to step {steps:,} the trunk had another schedule ({name} {before} at step {first + 1:,}, here {here}): "
        "this run differs from one that follows this recipe's schedule from step 0"
    )
