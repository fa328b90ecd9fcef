"""Reads what a run has cost from its records: recipe, metrics, checkpoint indices and DONE, finished or under way.

No torch, and no tensor of a checkpoint is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.errors import DataError, RecipeError
from vitscale.recipe import Recipe, read_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex
from vitscale.runs.checkpoints import read_checkpoints
from vitscale.runs.done import read_done
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import DONE_FILE, METRICS_FILE, RECIPE_FILE, checkpoints_root
from vitscale.runs.reading import count, number
from vitscale.storage import is_url

_GAPS_TOLD = 5


@dataclass(frozen=True)
class Run:
    """What a run has done and what it cost.

    Attributes:
        directory: the run's directory.
        recipe: the recipe that it follows.
        step: the last step in the metrics.
        seconds: the time that all steps took.
        device_seconds: the same, summed over devices; None if nothing tells how many there were.
        exaflops: exaFLOPs up to that step, without those of a branch's trunk.
        mfu: the mean over the device-seconds that have one, a fraction; None if none has.
        world_size: the number of devices in the last steps; None as above.
        world_sizes: all numbers of devices that it has run on.
        is_world_size_assumed: whether there are steps whose world size is taken from the newest checkpoint.
        num_classes, num_samples: as the newest checkpoint says; None without one.
        is_done: whether it is finished.
        best_step: the step that was selected; None before the end, and if nothing selects.
        evaluation: values by evaluator/metric, of the best step, or else of the last.
        notes: what is damaged or missing.
    """

    directory: Path
    recipe: Recipe
    step: int
    seconds: float
    device_seconds: float | None
    exaflops: float
    mfu: float | None
    world_size: int | None
    world_sizes: tuple[int, ...]
    is_world_size_assumed: bool
    num_classes: int | None
    num_samples: int | None
    is_done: bool
    best_step: int | None
    evaluation: dict[str, float]
    notes: tuple[str, ...]

    @property
    def images(self) -> int:
        """The number of images that the run itself has trained on."""
        return (self.step - self.recipe.first_step) * self.recipe.batch.global_size

    @property
    def images_per_s(self) -> float:
        """Images per second of all devices together, over all steps."""
        return self.images / self.seconds

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if something tells."""
        duration = self.recipe.schedule.duration
        if self.num_samples is None and duration.epochs is not None:
            return None
        return duration.to_steps(self.num_samples or 0, self.recipe.batch.global_size)


def read_run(directory: Path) -> Run:
    """Read the records of a run.

    Raises `RecipeError` if there is no run, `DataError` if it has not taken a step yet or its records are broken.
    """
    saved = directory / RECIPE_FILE
    try:
        if not saved.is_file():
            what = "there is no such directory" if not directory.is_dir() else f"there is no {RECIPE_FILE} in it"
            raise RecipeError(f"{directory} is no run directory: {what}")
    except OSError as error:
        raise RecipeError(f"{directory} cannot be read: {error.strerror}") from None
    recipe = read_recipe(saved)
    log = MetricsLog(directory / METRICS_FILE, whole=True)
    log.refresh()
    lines = [line for line in log.rows if number(line.get("exaflops"))]
    if not lines:
        raise DataError(f"{directory}: {METRICS_FILE} has no training step yet")
    index, notes = _newest_index(recipe, directory)
    damaged = log.damaged + log.is_torn + len(log.rows) - len(lines)
    notes += [f"damaged lines of {METRICS_FILE} left out: {damaged}"] if damaged else []
    first = recipe.first_step
    notes += _gap_notes([line["step"] for line in lines], recipe.logging.every, first)
    if first:
        notes.append(f"a branch; the {first:,} steps before it are in its trunk's cost")
    took = _seconds(lines, first)
    told = [count(line.get("world_size")) for line in lines]
    worlds = [world or (None if index is None else index.world_size) for world in told]
    known = [world for world in worlds if world is not None]
    device_seconds = [seconds * (world or 1) for seconds, world in zip(took, worlds, strict=True)]
    utilised = [
        (mfu, weight) for line, weight in zip(lines, device_seconds, strict=True) if (mfu := number(line.get("mfu")))
    ]
    is_done = (directory / DONE_FILE).exists()
    done = read_done(directory)
    if done is None and is_done:
        raise DataError(f"{directory / DONE_FILE} is damaged: expected a JSON object")
    done = done or {}
    best_step = count(done.get("best_step"))
    evaluation = done.get("evaluation")
    if best_step is not None and best_step != done.get("step"):
        evaluation = dict(log.evaluations).get(best_step)
    return Run(
        directory=directory,
        recipe=recipe,
        step=lines[-1]["step"],
        seconds=sum(took),
        device_seconds=sum(device_seconds) if len(known) == len(lines) else None,
        exaflops=lines[-1]["exaflops"] * (1 - first / lines[-1]["step"]),
        mfu=sum(mfu * weight for mfu, weight in utilised) / sum(weight for _, weight in utilised) if utilised else None,
        world_size=worlds[-1],
        world_sizes=tuple(sorted(set(known))),
        is_world_size_assumed=index is not None and None in told,
        num_classes=None if index is None else index.num_classes or None,
        num_samples=None if index is None else index.num_samples,
        is_done=is_done,
        best_step=best_step,
        evaluation=_numbers(evaluation),
        notes=tuple(notes),
    )


def _seconds(lines: Sequence[Row], first: int) -> list[float]:
    """Seconds of the steps that each line covers; the `first` steps were another run's."""
    before = [first, *(line["step"] for line in lines[:-1])]
    return [(line["step"] - step) * line["step_time_s"] for step, line in zip(before, lines, strict=True)]


def _gap_notes(steps: Sequence[int], every: int, first: int) -> list[str]:
    """Notes on steps whose metrics are lost. A line is due at every multiple of `every`, and where training stopped."""
    gaps = []
    for before, step in zip([first, *steps[:-1]], steps, strict=True):
        covered = (step - 1) // every * every  # the line covers the steps after that one
        if covered > before:
            gaps.append(f"{before + 1:,} to {covered:,}")
    if not gaps:
        return []
    more = f" and {len(gaps) - _GAPS_TOLD:,} times more" if len(gaps) > _GAPS_TOLD else ""
    return [f"steps {', '.join(gaps[:_GAPS_TOLD])}{more} have no metrics; their pace is assumed"]


def _newest_index(recipe: Recipe, directory: Path) -> tuple[CheckpointIndex | None, list[str]]:
    """The newest index that can be read, and notes on what is damaged. Checkpoints at a URL are not looked at."""
    root = checkpoints_root(recipe, directory)
    if is_url(root):
        return None, []
    found = read_checkpoints(Path(root))
    return found.newest, found.problems


def _numbers(values: Any) -> dict[str, float]:
    """The numbers of an evaluation."""
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if number(value) is not None}
