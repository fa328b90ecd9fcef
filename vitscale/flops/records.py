"""What lies in a run directory, finished or under way: recipe, metrics, checkpoint indices and DONE, read for what the
run has cost. No torch, and no checkpoint is opened."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitscale.errors import DataError, RecipeError
from vitscale.recipe import Recipe, read_recipe
from vitscale.run_directory import DONE_FILE, INDEX_FILES, RECIPE_FILE

METRICS_FILE = "metrics.jsonl"  # the name is that of training.metrics, which brings torch along
_GAPS_TOLD = 5

# No run comes near the bounds, and within them every sum is a number.
_Count = Annotated[int, Field(ge=1, lt=2**53)]
_MOST = 1e18
_Measure = Annotated[float, Field(gt=0, lt=_MOST)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _TrainingLine(_Record):
    """What is read here of a line of metrics."""

    step: _Count
    step_time_s: _Measure
    exaflops: _Measure
    mfu: _Measure | None = None
    world_size: _Count | None = None


class _Data(_Record):
    num_samples: _Count
    class_names: list[str]


class _Index(_Record):
    """What is read here of a checkpoint's index."""

    world_size: _Count
    data: _Data


@dataclass(frozen=True)
class Run:
    """What a run has done and what it cost.

    Attributes:
        directory: of the run.
        recipe: that it follows.
        step: the last one that metrics tell of.
        seconds: that all steps took.
        device_seconds: the same, summed over devices; None where nothing tells how many there were.
        exaflops: up to that step.
        mfu: the mean over the device-seconds that have one, a fraction; None where none has.
        world_size: devices of the last steps, None as above.
        world_sizes: all that it has run on.
        is_world_size_assumed: whether there are steps whose world size is taken from the newest checkpoint.
        num_classes, num_samples: of the newest checkpoint; None without one.
        is_done: whether it is finished.
        best_step: that was selected; None before the end, and where nothing selects.
        evaluation: of the best step, or else of the last: values by evaluator/metric.
        notes: on what is damaged or missing.
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
        """That the run has trained on."""
        return self.step * self.recipe.batch.global_size

    @property
    def images_per_s(self) -> float:
        """Of all devices together, over all steps."""
        return self.images / self.seconds

    @property
    def total_steps(self) -> int | None:
        """Of the whole run, where something tells it."""
        duration = self.recipe.schedule.duration
        if self.num_samples is None and duration.epochs is not None:
            return None
        return duration.to_steps(self.num_samples or 0, self.recipe.batch.global_size)


def read_run(directory: Path) -> Run:
    """Read the records of a run.

    Raises `RecipeError` where there is no run, `DataError` where it has not taken a step yet or its records are broken.
    """
    saved = directory / RECIPE_FILE
    try:
        if not saved.is_file():
            what = "there is no such directory" if not directory.is_dir() else f"there is no {RECIPE_FILE} in it"
            raise RecipeError(f"{directory} is no run directory: {what}")
    except OSError as error:
        raise RecipeError(f"{directory} cannot be read: {error.strerror}") from None
    recipe = read_recipe(saved)
    lines, evaluations, damaged = _read_metrics(directory / METRICS_FILE)
    if not lines:
        raise DataError(f"{directory}: {METRICS_FILE} tells of no training step yet")
    index, notes = _newest_index(directory)
    notes += [f"damaged lines of {METRICS_FILE} left out: {damaged}"] if damaged else []
    notes += _gap_notes([line.step for line in lines], recipe.logging.every)
    took = _seconds(lines)
    worlds = [line.world_size or (None if index is None else index.world_size) for line in lines]
    known = [world for world in worlds if world is not None]
    device_seconds = [seconds * (world or 1) for seconds, world in zip(took, worlds, strict=True)]
    utilised = [(line.mfu, weight) for line, weight in zip(lines, device_seconds, strict=True) if line.mfu is not None]
    is_done = (directory / DONE_FILE).exists()
    done = _json(directory / DONE_FILE) if is_done else {}
    best_step = done["best_step"] if isinstance(done.get("best_step"), int) else None
    evaluation = done.get("evaluation")
    if best_step is not None and best_step != done.get("step"):
        evaluation = evaluations.get(best_step)
    return Run(
        directory=directory,
        recipe=recipe,
        step=lines[-1].step,
        seconds=sum(took),
        device_seconds=sum(device_seconds) if len(known) == len(lines) else None,
        exaflops=lines[-1].exaflops,
        mfu=sum(mfu * weight for mfu, weight in utilised) / sum(weight for _, weight in utilised) if utilised else None,
        world_size=worlds[-1],
        world_sizes=tuple(sorted(set(known))),
        is_world_size_assumed=index is not None and any(line.world_size is None for line in lines),
        num_classes=None if index is None else len(index.data.class_names) or None,
        num_samples=None if index is None else index.data.num_samples,
        is_done=is_done,
        best_step=best_step,
        evaluation=_numbers(evaluation),
        notes=tuple(notes),
    )


def _read_metrics(path: Path) -> tuple[list[_TrainingLine], dict[int, dict[str, Any]], int]:
    """Lines of training, their steps increasing; evaluations by step; how many lines are damaged: a crash tears one."""
    lines: list[_TrainingLine] = []
    evaluations: dict[int, dict[str, Any]] = {}
    damaged = 0
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], {}, 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    for text in content.splitlines():
        try:
            content_of_line = json.loads(text)
            values = {key.removeprefix("eval/"): value for key, value in content_of_line.items() if key[:5] == "eval/"}
            if values:
                evaluations[content_of_line["step"]] = values
                continue
            line = _TrainingLine.model_validate(content_of_line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged += 1
            continue
        if lines and line.step <= lines[-1].step:
            damaged += 1
        else:
            lines.append(line)
    return lines, evaluations, damaged


def _seconds(lines: Sequence[_TrainingLine]) -> list[float]:
    """What the steps took that each line closes."""
    before = [0, *(line.step for line in lines[:-1])]
    return [(line.step - step) * line.step_time_s for step, line in zip(before, lines, strict=True)]


def _gap_notes(steps: Sequence[int], every: int) -> list[str]:
    """On steps whose metrics are lost. There is a line at every multiple of `every`, and where training stopped."""
    gaps = []
    for before, step in zip([0, *steps[:-1]], steps, strict=True):
        covered = (step - 1) // every * every  # the line tells of the steps behind that one
        if covered > before:
            gaps.append(f"{before + 1:,} to {covered:,}")
    if not gaps:
        return []
    more = f" and {len(gaps) - _GAPS_TOLD:,} times more" if len(gaps) > _GAPS_TOLD else ""
    return [f"steps {', '.join(gaps[:_GAPS_TOLD])}{more} have no metrics; their pace is assumed"]


def _newest_index(directory: Path) -> tuple[_Index | None, list[str]]:
    """The newest index that can be read, and notes on newer ones that cannot."""
    notes: list[str] = []
    # A longer name is a later step, too.
    for path in sorted(directory.glob(INDEX_FILES), key=lambda path: (len(str(path)), path), reverse=True):
        try:
            return _Index.model_validate_json(path.read_bytes()), notes
        except ValidationError as error:
            first = error.errors()[0]
            what = ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
        except OSError as error:
            what = error.strerror or "cannot be read"
        notes.append(f"{path.relative_to(directory)} is damaged and left out: {what}")
    return None, notes


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object")
    return content


def _numbers(values: Any) -> dict[str, float]:
    """Those of an evaluation; JSON of Python's may hold NaN."""
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if isinstance(value, float | int) and abs(value) < _MOST}
