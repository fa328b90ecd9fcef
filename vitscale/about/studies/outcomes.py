"""What the entries' runs have come to, read from their directories, and whether these still belong to the entries."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitscale.about.studies.expansion import Entry
from vitscale.ground.errors import DataError, RecipeError
from vitscale.recipe import Recipe, changes, differences, read_recipe
from vitscale.runs.done import read_done
from vitscale.runs.names import METRICS_FILE, RECIPE_FILE
from vitscale.runs.reading import count, number
from vitscale.runs.run import Run


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        metrics: values by evaluator/metric: of the best step if the recipe selects one, else of the last.
        step: the step that the metrics belong to.
        steps: the number of steps that the run took.
        exaflops: the run's exaFLOPs.
    """

    metrics: dict[str, float]
    step: int | None
    steps: int | None
    exaflops: float | None


def read_outcome(run_dir: Path) -> Outcome | None:
    """Read a run's outcome; None if it is not finished.

    Raises `RecipeError` if its recipe cannot be read, `DataError` if its metrics cannot, or lack the selected step's:
    without a score it would count as diverged, and another candidate would win.
    """
    done = read_done(run_dir)
    if done is None:
        return None
    run, steps = Run(run_dir), count(done.get("step"))
    if run.best_step is not None and not run.evaluation:
        raise DataError(
            f"{run_dir / METRICS_FILE} lacks the evaluation of step {run.best_step:,}, which the run has selected: "
            "restore the file, or remove the directory to train again"
        )
    return Outcome(
        run.evaluation, steps if run.best_step is None else run.best_step, steps, number(done.get("exaflops"))
    )


def changed_fields(run_dir: Path, recipe: Recipe) -> list[str]:
    """Lines `key: old -> new` if the run in a directory has another recipe; none if no run has begun there.

    Fields that may change when a run is resumed may differ, except its evaluation: results would not be comparable.
    """
    saved = run_dir / RECIPE_FILE
    if not saved.exists():
        return []
    old, new = read_recipe(saved).dump(), recipe.dump()
    if new["precision"] == "auto":  # the run has settled it
        new["precision"] = old["precision"]
    if new.get("init") is not None:  # whose functions the run may have taken
        new["model"] = {key: old["model"][key] for key in ("mlp", "norm_eps") if key in old["model"]} | new["model"]
    evaluation = changes(old["evaluation"], new["evaluation"], "evaluation.")
    return differences(old, new) + [f"{key}: {before!r} -> {after!r}" for key, before, after in evaluation]


def check_unchanged(entries: Iterable[Entry], folder: Path) -> None:
    """Raise `RecipeError` if a directory holds the run of an entry that the study has changed since."""
    found = []
    for entry in entries:
        each = [changed_fields(folder / entry.name, option.recipe) for option in entry.options]
        if all(each):
            found += [f"  {entry.name}: {line}" for line in min(each, key=len)]
    if found:
        raise RecipeError(
            f"{folder} holds runs of entries that have changed since:\n"
            + "\n".join(found)
            + "\nUse another --dir, remove "
            "the directories of these entries, or undo the change"
        )
