"""Reads one run directory: whatever state it is in, there is an answer or one readable error."""

import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from vitscale.about.status import recent
from vitscale.about.status.liveness import Signs, State, judge
from vitscale.about.status.summary import Anomalies, Best, Evaluation, Restarts, RunStatus, Saved
from vitscale.flops.accounting import cost_row
from vitscale.flops.accounting import mfu as model_flops_utilisation
from vitscale.flops.hardware import Device
from vitscale.flops.work import recipe_work
from vitscale.ground.errors import DataError, RecipeError, VitscaleError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url
from vitscale.recipe import Recipe, read_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex
from vitscale.runs.directory import is_held, last_holder
from vitscale.runs.done import verification
from vitscale.runs.launches import Launches
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import ANOMALIES_DIR, CHECKPOINTS, DONE_FILE, LAUNCH_FILE, METRICS_FILE, RECIPE_FILE
from vitscale.runs.reading import count, number, read_object
from vitscale.runs.run import RunFiles

_MANIFEST = "manifest.json"  # the name in shards.manifest, which would import NumPy
_SIGNS_OF_A_RUN = (RECIPE_FILE, METRICS_FILE, LAUNCH_FILE, DONE_FILE, CHECKPOINTS)
_STEP_TIMEOUT_S = 600.0  # if no recipe gives `check.step_timeout_s`
_SHOWN_RESTARTS = 5


class NoRunYetError(RecipeError):
    """Nothing is at a path yet, or only an empty folder."""


class RunReader:
    """Reads one run directory, as often as needed; only the new part of the metrics each time.

    Args:
        directory: the run's directory, as messages should call it.
        device: the device for energy, and for the MFU if the metrics have none.
        price: the price of one device for one hour.
    """

    def __init__(self, directory: str, device: Device | None = None, price: float | None = None) -> None:
        self._name, self._device, self._price = directory, device, price
        self._directory = Path(directory)
        self._log = MetricsLog(self._directory / METRICS_FILE)
        self._recipe: Recipe | None = None
        self._recipe_version: int | None = None
        self._recipe_problem = ""
        self._manifest: dict[str, Any] | None = None

    def read(self) -> RunStatus:
        """How the run is doing now.

        Raises `RecipeError` if there is no run, `DataError` if its metrics or launches cannot be read.
        """
        self._check_is_run()
        self._read_recipe()
        run = RunFiles(self._directory, self._recipe, self._log)
        log, rows = run.metrics, list(run.metrics.rows)
        notes = [self._recipe_problem] if self._recipe_problem else []
        notes += [] if run.checkpoints is None else run.checkpoints.problems
        saved = _saved(run)
        done = _done(run, notes)
        num_samples, num_classes = self._data(run.index)
        last = rows[-1] if rows else {}
        step = count(done.get("step")) if done else None
        step = _step(log, saved) if step is None else step
        total = count(done.get("total_steps")) if done else None
        total = run.steps_for(num_samples) if total is None else total
        pace = recent.pace(rows)
        state, why = _state(run, done, pace)
        notes += _damage(run)
        self._check_is_run()  # what was removed meanwhile is no run at its beginning
        return RunStatus(
            run=self._name,
            state=state,
            why=why,
            step=step,
            total_steps=total,
            precision=None if run.recipe is None else run.recipe.precision,
            selects=run.recipe is not None and run.recipe.selection is not None,
            line_age_s=None if log.line_at is None else _age(log.line_at),
            loss=number(last.get("loss")),
            trend=recent.trend(rows),
            lr=number(last.get("lr")),
            images_per_s=number(last.get("images_per_s")),
            mfu=self._mfu(last, num_classes),
            step_time_s=number(last.get("step_time_s")),
            world_size=count(last.get("world_size")),
            world_sizes=log.world_sizes,
            data_wait=recent.data_wait(rows),
            peak_memory_bytes=number(last.get("peak_memory_bytes")),
            left_s=_left(step, total, pace) if done is None else None,
            exaflops=number(last.get("exaflops")),
            **self._cost(log),
            is_estimated=log.is_sampled,
            evaluation=_last_evaluation(log, done or {}),
            best=_best(run, saved),
            checkpoints=saved,
            verified=verification(self._directory, saved.where) if done is not None else None,
            restarts=_restarts(run.launches),
            anomalies=_anomalies(run, last),
            slowest_rank=recent.slowest_rank(rows),
            notes=notes,
        )

    def _check_is_run(self) -> None:
        directory = self._name
        if is_url(directory):
            raise RecipeError(f"{directory}: expected a run's directory on this machine, no URL")
        try:
            names = set(os.listdir(directory))  # noqa: PTH208 (names are enough)
        except FileNotFoundError:
            raise NoRunYetError(f"{directory} is not a run directory: there is no such directory") from None
        except NotADirectoryError:
            raise RecipeError(f"{directory} is not a run directory: it is a file") from None
        except OSError as error:
            raise RecipeError(f"{directory} cannot be read: {error.strerror}") from None
        if not names:
            raise NoRunYetError(f"{directory} is not a run directory: it is empty")
        if not names.intersection(_SIGNS_OF_A_RUN):
            raise RecipeError(f"{directory} is not a run directory: it has no {RECIPE_FILE}")

    # ---- What the run is ---------------------------------------------------------------------------------------------

    def _read_recipe(self) -> None:
        path = self._directory / RECIPE_FILE
        try:
            version = path.stat().st_mtime_ns
            if version == self._recipe_version:
                return
            self._recipe, self._recipe_problem = read_recipe(path), ""
            self._recipe_version = version
        except FileNotFoundError:
            self._recipe, self._recipe_problem = None, f"there is no {RECIPE_FILE} yet"
        except (OSError, RecipeError) as error:
            self._recipe, self._recipe_problem = None, " ".join(str(error).split())

    def _data(self, index: CheckpointIndex | None) -> tuple[int | None, int | None]:
        """Training samples and classes: from the newest checkpoint, or from the manifest if it is on this machine."""
        if index is not None:
            return index.num_samples, index.num_classes
        if self._manifest is None and self._recipe is not None:
            self._manifest = _read_manifest(self._recipe)
        manifest = self._manifest or {}
        names = manifest.get("class_names")
        return count(manifest.get("num_samples")), len(names) if isinstance(names, list) else None

    def _mfu(self, last: Row, num_classes: int | None) -> float | None:
        """The MFU of the last line; if that has none, on the device that the user names."""
        logged = number(last.get("mfu"))
        images_per_s, world_size = number(last.get("images_per_s")), count(last.get("world_size"))
        recipe, device = self._recipe, self._device
        if logged is not None or recipe is None or device is None or not images_per_s or not world_size:
            return logged
        num_classes = recipe.model.num_classes or num_classes
        if num_classes is None or recipe.precision not in device.peak:
            return None
        macs = recipe_work(recipe, num_classes).macs
        return model_flops_utilisation(images_per_s, macs, world_size, device.training_peak[0])

    def _cost(self, log: MetricsLog) -> dict[str, Any]:
        if not log.rows:
            return dict.fromkeys(("hours", "device_hours", "energy_kwh", "cost"))
        device_hours = None if log.device_seconds is None else log.device_seconds / 3600
        return cost_row(log.seconds / 3600, device_hours, self._device, self._price)


# ---- How it is doing -------------------------------------------------------------------------------------------------


def _done(run: RunFiles, notes: list[str]) -> dict[str, Any] | None:
    """The content of DONE; None without one."""
    try:
        return run.done
    except DataError:
        notes.append(f"{run.directory / DONE_FILE} is damaged and ignored")
        return None


def _state(run: RunFiles, done: dict[str, Any] | None, pace: float | None) -> tuple[State, str]:
    if done is not None:
        return ("stopped early", "because no evaluation was better") if done.get("stopped_early") else ("done", "")
    return judge(
        Signs(
            is_held=is_held(run.directory),
            last_event=run.launches.last,
            is_only_here={socket.gethostname()} == (run.launches.unfinished_on or {last_holder(run.directory)}),
            line_at=run.metrics.line_at,
            due_s=_due_s(run.recipe, pace),
            timeout_s=_STEP_TIMEOUT_S if run.recipe is None else run.recipe.check.step_timeout_s,
        ),
        time.time(),
    )


def _step(log: MetricsLog, saved: Saved) -> int | None:
    """The highest step in the metrics, or that of a checkpoint that is newer."""
    steps = [row["step"] for row in [*log.rows][-1:]] + [step for step, _ in log.evaluations[-1:]]
    line_age_s = math.inf if log.line_at is None else _age(log.line_at)
    if saved.step is not None and saved.age_s is not None and saved.age_s < line_age_s:
        steps.append(saved.step)
    return max(steps, default=None)


def _last_evaluation(log: MetricsLog, done: dict[str, Any]) -> Evaluation | None:
    if log.evaluations:
        return Evaluation(*log.evaluations[-1])
    values, step = done.get("evaluation"), count(done.get("step"))
    if step is None or not isinstance(values, dict) or not values:
        return None
    return Evaluation(step, {key: number(value) for key, value in values.items()})


def _best(run: RunFiles, saved: Saved) -> Best | None:
    """The best step that the run itself has selected, or a later one; without a selection, the best evaluation."""
    rule = run.recipe.selection if run.recipe is not None else None
    metric, sign = (rule.metric, 1 if rule.mode == "max" else -1) if rule is not None else ("validation/top1", 1)
    found = [(step, values.get(metric)) for step, values in run.metrics.evaluations]
    if rule is not None and run.index is not None:
        selected = count(run.index.selection.get("best_step")), number(run.index.selection.get("best"))
        found = [(step, value) for step, value in [selected, *found] if step is not None]
    known = [(sign * value, -step) for step, value in found if value is not None]
    if not known:
        return None
    value, step = max(known)  # the first of equal ones
    return Best(-step, metric, sign * value, None if saved.steps is None else -step in saved.steps)


def _saved(run: RunFiles) -> Saved:
    found = run.checkpoints
    if found is None:
        return Saved(without_secrets(run.checkpoints_root), None, None, None, None, None)
    step = found.steps[-1] if found.steps else None
    size = found.newest.bytes if found.newest is not None and found.newest.step == step else None
    age = None if found.saved_at is None else _age(found.saved_at)
    return Saved(run.checkpoints_root, found.steps, len(found.steps), step, age, size)


def _anomalies(run: RunFiles, last: Row) -> Anomalies | None:
    reports = sorted((run.directory / ANOMALIES_DIR).glob("step-*.json"))
    left_out = count(last.get("anomalies")) or 0
    if not reports and not left_out:
        return None
    newest = read_object(reports[-1]) if reports else None
    return Anomalies(
        left_out=left_out,
        limit=None if run.recipe is None else run.recipe.anomalies.limit,
        reports=len(reports),
        last=None if newest is None else {key: newest.get(key) for key in ("step", "kind", "policy")},
    )


def _damage(run: RunFiles) -> list[str]:
    counts = {METRICS_FILE: run.metrics.damaged, LAUNCH_FILE: run.launches.damaged}
    notes = [f"damaged lines of {file} left out: {damaged:,}" for file, damaged in counts.items() if damaged]
    if run.metrics.is_sampled:
        notes.append(
            f"{METRICS_FILE} is large: hours and cost are estimated from parts of it, evaluations are those at its "
            f"end (vitscale-flops --run reads the whole)"
        )
    return notes


def _read_manifest(recipe: Recipe) -> dict[str, Any]:
    try:
        where = recipe.dataset_path(recipe.data.train)
    except VitscaleError:
        return {}
    if is_url(where):
        return {}
    path = Path(where)
    return read_object(path / _MANIFEST if path.is_dir() else path) or {}


def _restarts(launches: Launches) -> Restarts | None:
    if launches.last is None:
        return None
    return Restarts(launches.count, len(launches.restarts), launches.restarts[-_SHOWN_RESTARTS:])


def _due_s(recipe: Recipe | None, pace: float | None) -> float | None:
    """Seconds between two lines of metrics."""
    if recipe is None or pace is None:
        return None
    return min(recipe.logging.every * pace, max(recipe.logging.most_s, pace))


def _left(step: int | None, total: int | None, pace: float | None) -> float | None:
    return None if step is None or total is None or pace is None else max(0, total - step) * pace


def _age(at: float) -> float:
    """Seconds since `at`, at least 0, as the clocks of two machines may differ."""
    return max(0.0, time.time() - at)
