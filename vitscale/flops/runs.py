"""A run that is done, or under way: what its own records say that it cost. No torch, and no checkpoint is opened."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitscale.errors import DataError, RecipeError
from vitscale.flops.accounting import mfu as model_flops_utilisation
from vitscale.flops.cost import ENERGY_SAYS, Cost
from vitscale.flops.hardware import Device
from vitscale.flops.view import Column, Row, View, number, percent
from vitscale.flops.work import recipe_work
from vitscale.recipe import Recipe, read_recipe

# The names are those of checkpoint.run_directory and training.metrics, which bring torch along.
RECIPE_FILE, METRICS_FILE, DONE_FILE, INDEX_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "DONE",
    "checkpoints/step-*/index.json",
)

_COLUMNS = (
    Column("run", "run", is_text=True),
    Column("finished", "done", lambda done: "yes" if done else "no", is_text=True, spare=6),
    Column("step", "step", number(0)),
    Column("total_steps", "of", number(0), spare=5),
    Column("images", "images", number(0), spare=3),
    Column("exaflops", "exaFLOPs", number(3)),
    Column("images_per_s", "images/s", number(1)),
    Column("mfu", "MFU", percent(1)),
    Column("devices", "devices", number(0), spare=4),
    Column("hours", "hours", number(2)),
    Column("device_hours", "device\nhours", number(2), spare=2),
    Column("energy_kwh", "kWh", number(1), spare=1),
    Column("cost", "cost", number(2)),
)
_HOURS_SAY = "Hours and images/s: of training steps alone, without evaluation, checkpoints and steps that a crash lost."


@dataclass(frozen=True)
class Run:
    """What lies in a run directory.

    Attributes:
        directory: of the run.
        recipe: that it follows.
        step: the last one that metrics tell of.
        seconds: that all steps took.
        exaflops: up to that step.
        mfu: the mean over the steps that have one, a fraction; None where none has.
        world_size, num_classes, num_samples: of the newest checkpoint; None without one.
        done: what `DONE` says; None where the run is not finished.
        damaged_lines: of the metrics that could not be read.
    """

    directory: Path
    recipe: Recipe
    step: int
    seconds: float
    exaflops: float
    mfu: float | None
    world_size: int | None
    num_classes: int | None
    num_samples: int | None
    done: dict[str, Any] | None
    damaged_lines: int

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
    if not saved.is_file():
        what = "there is no such directory" if not directory.is_dir() else f"there is no {RECIPE_FILE} in it"
        raise RecipeError(f"{directory} is no run directory: {what}")
    lines, damaged = _training_lines(directory / METRICS_FILE)
    if not lines:
        raise DataError(f"{directory}: {METRICS_FILE} tells of no training step yet")
    seconds = utilised = weight = 0.0
    step = 0
    for line in lines:
        took = (line["step"] - step) * line["step_time_s"]
        step = line["step"]
        seconds += took
        if "mfu" in line:
            utilised, weight = utilised + line["mfu"] * took, weight + took
    index = _newest_index(directory)
    data = index.get("data", {})
    class_names = data.get("class_names")
    return Run(
        directory=directory,
        recipe=read_recipe(saved),
        step=step,
        seconds=seconds,
        exaflops=lines[-1]["exaflops"],
        mfu=utilised / weight if weight else None,
        world_size=index.get("world_size"),
        num_classes=len(class_names) if class_names else None,
        num_samples=data.get("num_samples"),
        done=_json(directory / DONE_FILE) if (directory / DONE_FILE).exists() else None,
        damaged_lines=damaged,
    )


def _training_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines with the pace of training, their steps increasing, and how many lines are damaged: a crash tears one."""
    lines: list[dict[str, Any]] = []
    damaged = 0
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            damaged += 1
            continue
        if isinstance(line, dict) and any(str(key).startswith("eval/") for key in line):
            continue
        last = lines[-1]["step"] if lines else 0
        if _is_training_line(line) and line["step"] > last:
            lines.append(line)
        else:
            damaged += 1
    return lines, damaged


def _is_training_line(line: Any) -> bool:
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    needed = [line.get("step_time_s"), line.get("exaflops"), *([line["mfu"]] if "mfu" in line else [])]
    return all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in needed)


def _newest_index(directory: Path) -> dict[str, Any]:
    found = sorted(directory.glob(INDEX_FILES))
    return _json(found[-1]) if found else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object")
    return content


def runs_view(runs: Sequence[Run], device: Device | None, count: int | None, price: float | None) -> View:
    """What runs have cost so far, on as many devices as the newest checkpoint says; `count` overrules that."""
    rows: list[Row] = []
    legend = [_HOURS_SAY, *([ENERGY_SAYS] if device is not None and device.watts is not None else [])]
    notes: list[str] = []
    for run in runs:
        devices = count or run.world_size
        rows.append(
            {
                "run": str(run.directory),
                "finished": run.done is not None,
                "step": run.step,
                "total_steps": run.total_steps,
                "images": run.images,
                "exaflops": run.exaflops,
                "images_per_s": run.images_per_s,
                "mfu": run.mfu or _mfu(run, device, devices),
                "devices": devices,
                **asdict(Cost.of(run.seconds / 3600, devices, device, price)),
            }
        )
        if devices is None:
            notes.append(f"{run.directory}: without a checkpoint nothing tells on how many devices; say --devices N")
        if rows[-1]["mfu"] is None:
            notes.append(f"{run.directory}: no MFU: {_no_mfu(run, device)}")
        if run.damaged_lines:
            notes.append(f"{run.directory}: damaged lines of {METRICS_FILE} left out: {run.damaged_lines}")
    return View(_COLUMNS, rows, legend, notes)


def _mfu(run: Run, device: Device | None, devices: int | None) -> float | None:
    """Where the metrics have none: from images/s, on the device that the user names."""
    num_classes = run.recipe.model.num_classes or run.num_classes
    if device is None or devices is None or num_classes is None or run.recipe.precision not in device.peak:
        return None
    macs = recipe_work(run.recipe, num_classes).macs
    return model_flops_utilisation(run.images_per_s, macs, devices, device.training_peak[0])


def _no_mfu(run: Run, device: Device | None) -> str:
    if device is None:
        return "the metrics have none, the device being unknown or the precision fp32; name it with --hardware"
    if run.recipe.precision not in device.peak:
        return f"the run computes in {run.recipe.precision}, of which the peak of {device.name} is not known"
    return "without a checkpoint nothing tells devices or classes"
