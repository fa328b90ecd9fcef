"""What the entries of a study have come to, by the directories of their runs, and which candidates win by that.

A choice is a pure function of what candidates reached on development splits, and of nothing else.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from vitscale.about.studies.expansion import Choice, Entry, Expansion
from vitscale.about.studies.forecast import Forecast
from vitscale.about.studies.reading import Selection
from vitscale.ground.errors import DataError, RecipeError
from vitscale.launch.ends import EXIT_NON_FINITE
from vitscale.recipe import Recipe, changes, differences, read_recipe
from vitscale.runs.done import read_done
from vitscale.runs.names import METRICS_FILE, RECIPE_FILE
from vitscale.runs.reading import count, number
from vitscale.runs.run import Run

State = Literal["waiting", "running", "done", "failed", "not run"]


class Outcome(NamedTuple):
    """A finished run."""

    metrics: dict[str, float]  # by evaluator/metric: of the best step if the recipe selects one, else of the last
    step: int | None  # to which the metrics belong
    steps: int | None  # that the run took
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
    changed = []
    for entry in entries:
        by_option = [changed_fields(folder / entry.name, option.recipe) for option in entry.options]
        if all(by_option):
            changed += [f"  {entry.name}: {line}" for line in min(by_option, key=len)]
    if changed:
        raise RecipeError(
            "\n".join([f"{folder} holds runs of entries that have changed since:", *changed])
            + "\nUse another --dir, remove the directories of these entries, or undo the change"
        )


def mean_scores(scores: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """The mean of each candidate over its runs; None if one of them has diverged."""
    means = {}
    for label, values in scores.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        means[label] = statistics.fmean(known) if known and len(known) == len(values) else None
    return means


def choose(rule: Selection, scores: Mapping[str, Sequence[float | None]]) -> str | None:
    """The label of the winner, the first of equal ones; None if every candidate has diverged.

    `scores`: label -> the metric of each of its runs (seeds, and data sets that share a winner), None for one that has
    diverged.
    """
    sign = 1 if rule.mode == "max" else -1
    known = [(sign * mean, label) for label, mean in mean_scores(scores).items() if mean is not None]
    return max(known, key=lambda one: one[0])[1] if known else None


@dataclass
class Progress:
    """The progress of an entry."""

    state: State = "waiting"
    code: int | None = None  # the exit code of its launch, if that has failed
    why: str = ""  # it has failed or is not run
    outcome: Outcome | None = None  # once it is done


class StudyState:
    """What is known of a study: the progress of its entries, winners of choices that are decided, and forecasts."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.progress = {name: Progress() for name in expansion.entries}
        self.winners: dict[str, str | None] = {}
        self.forecasts: dict[str, Forecast] = {}

    def label_of(self, entry: Entry) -> str | None:
        """The label of the option that runs; None if that is not known yet."""
        return entry.options[0].label if entry.choice is None else self.winners.get(entry.choice)

    def decide_choices(self) -> None:
        """Name the winner of each choice whose candidates have all ended."""
        for choice in self.expansion.choices.values():
            if choice.name not in self.winners and all(self.has_scored(name) for name in choice.entries):
                self.winners[choice.name] = choose(choice.rule, self.scores(choice))

    def has_scored(self, name: str) -> bool:
        """Whether a candidate's run has ended; one that has diverged has lost."""
        progress = self.progress[name]
        return progress.state == "done" or progress.code == EXIT_NON_FINITE

    def scores(self, choice: Choice) -> dict[str, list[float | None]]:
        """The scores that the runs of each candidate have reached so far."""
        scores: dict[str, list[float | None]] = {}
        for label, entries in choice.candidates.items():
            outcomes = [self.progress[name].outcome for name in entries]
            scores[label] = [None if outcome is None else outcome.metrics.get(choice.metric) for outcome in outcomes]
        return scores
