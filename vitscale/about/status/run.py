"""How a run is doing, by its directory: whatever state that is in, there is an answer or one readable error."""

import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.about.status import recent
from vitscale.about.status.liveness import State, judge
from vitscale.about.status.recent import SlowestRank, Trend
from vitscale.ground.errors import DataError, RecipeError, VitscaleError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import is_url
from vitscale.recipe import Recipe, read_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex
from vitscale.runs.directory import is_held, last_holder
from vitscale.runs.done import verification
from vitscale.runs.launches import Event
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import ANOMALIES_DIR, CHECKPOINTS, DONE_FILE, LAUNCH_FILE, METRICS_FILE, RECIPE_FILE
from vitscale.runs.reading import count, number, read_object, text
from vitscale.runs.run import RunFiles

_MANIFEST = "manifest.json"  # the name in shards.manifest, which would import NumPy
_SIGNS_OF_A_RUN = (RECIPE_FILE, METRICS_FILE, LAUNCH_FILE, DONE_FILE, CHECKPOINTS)
_STEP_TIMEOUT_S = 600.0  # if no recipe gives `check.step_timeout_s`
_SHOWN_RESTARTS = 5
_FIGURES = ("loss", "lr", "images_per_s", "mfu", "step_time_s", "peak_memory_bytes", "exaflops")  # of the last line


class NoRunYetError(RecipeError):
    """Nothing is at a path yet, or only an empty folder."""


@dataclass(frozen=True)
class Evaluation:
    """Values by evaluator/metric after `step` updates; None for one that is not finite."""

    step: int
    values: dict[str, float | None]


@dataclass(frozen=True)
class Best:
    """The best evaluation by `metric`."""

    step: int
    metric: str
    value: float
    is_kept: bool | None  # whether there is a checkpoint of its step; None for checkpoints at a URL, which is not asked


@dataclass(frozen=True)
class Saved:
    """The checkpoints, and the newest one's step, age in seconds and size."""

    where: str  # path or URL; nothing more is known about a URL, which is not asked
    steps: list[int] | None = None  # of the checkpoints there, oldest first
    count: int | None = None
    step: int | None = None
    age_s: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Restarts:
    """Restarts by `vitscale launch`."""

    launches: int  # how often it was called
    count: int  # of restarts by these calls
    last: list[Event]  # of these, oldest first


@dataclass(frozen=True)
class Anomalies:
    """Batches that must not be trained on."""

    left_out: int  # how often the run skipped batches or went back
    limit: int | None  # the recipe's, for that
    reports: int  # files in anomalies/
    last: dict[str, Any] | None  # `step`, `kind` and `policy` of the report of the highest step


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing; what is not known is None everywhere."""

    run: str  # its directory
    state: State
    why: str
    step: int | None  # updates done
    total_steps: int | None  # of the whole run
    precision: str | None  # that the recipe computes in
    selects: bool  # whether the recipe has a `selection`
    line_age_s: float | None  # seconds since the last line of metrics
    loss: float | None  # as the next ones, the value in that line
    trend: Trend | None
    lr: float | None
    images_per_s: float | None
    mfu: float | None
    step_time_s: float | None
    world_size: int | None
    world_sizes: list[int]  # on which it has run, in the order in which they first appear
    data_wait: float | None  # the share of the last lines' time that was spent waiting for data, a fraction
    peak_memory_bytes: float | None
    left_s: float | None  # that the remaining steps take at the mean pace of the last lines
    exaflops: float | None  # so far, without those of a branch's trunk
    hours: float | None  # as the next one, for the steps so far, without evaluations, checkpoints and lost steps
    device_hours: float | None
    evaluation: Evaluation | None  # the last one
    best: Best | None  # by the recipe's `selection`, or else by top-1 accuracy
    checkpoints: Saved
    verified: str | None  # what `vitscale verify` found, beginning with `yes` or `no`; None before the end
    restarts: Restarts | None
    anomalies: Anomalies | None
    slowest_rank: SlowestRank | None
    notes: list[str]  # what is damaged or missing

    @property
    def is_done(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "stopped early")


class RunReader:
    """Reads one run directory, named as messages should call it, as often as needed; only what is new each time."""

    def __init__(self, directory: str) -> None:
        self._name, self._directory = directory, Path(directory)
        self._log = MetricsLog(self._directory / METRICS_FILE)
        self._recipe: Recipe | None = None
        self._recipe_version: int | None = None
        self._recipe_problem = ""
        self._manifest: dict[str, Any] | None = None

    def read(self) -> RunStatus:
        """How the run does now. Raises `RecipeError` without a run, `DataError` for unreadable metrics or launches."""
        self._check_is_run()
        self._read_recipe()
        run = RunFiles(self._directory, self._recipe, self._log)
        log, rows = run.metrics, list(run.metrics.rows)
        notes = [self._recipe_problem] if self._recipe_problem else []
        notes += [] if run.checkpoints is None else run.checkpoints.problems
        saved = _saved(run)
        try:
            done = run.done
        except DataError:
            done = None
            notes.append(f"{run.directory / DONE_FILE} is damaged and ignored")
        last = rows[-1] if rows else {}
        step, total = (count((done or {}).get(key)) for key in ("step", "total_steps"))
        step = _step(log, saved) if step is None else step
        total = run.steps_for(self._num_samples(run.index)) if total is None else total
        figures: dict[str, Any] = {key: number(last.get(key)) for key in _FIGURES}
        if (first := 0 if run.recipe is None else run.recipe.first_step) and figures["exaflops"]:
            figures["exaflops"] *= 1 - first / last["step"]  # the `first` steps were another run's
        pace = recent.pace(rows)
        left_s = None if step is None or total is None or pace is None else max(0, total - step) * pace
        state, why = _state(run, done, pace)
        events = run.launches
        restarts = Restarts(events.count, len(events.restarts), events.restarts[-_SHOWN_RESTARTS:])
        damaged = {METRICS_FILE: run.metrics.damaged, LAUNCH_FILE: run.launches.damaged}
        notes += [f"damaged lines of {file} left out: {lines:,}" for file, lines in damaged.items() if lines]
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
            trend=recent.trend(rows),
            world_size=count(last.get("world_size")),
            world_sizes=list(log.world_sizes),
            data_wait=recent.data_wait(rows),
            left_s=left_s if done is None else None,
            **figures,
            hours=log.seconds / 3600 if rows else None,
            device_hours=log.device_seconds / 3600 if rows and log.device_seconds is not None else None,
            evaluation=_last_evaluation(log, done or {}),
            best=_best(run, saved),
            checkpoints=saved,
            verified=verification(self._directory, saved.where) if done is not None else None,
            restarts=None if events.last is None else restarts,
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

    def _num_samples(self, index: CheckpointIndex | None) -> int | None:
        """Training samples: from the newest checkpoint, or from the manifest if it is on this machine."""
        if index is not None:
            return index.num_samples
        if self._manifest is None and self._recipe is not None:
            self._manifest = {}
            with suppress(VitscaleError):
                if not is_url(where := self._recipe.dataset_path(self._recipe.data.train)):
                    path = Path(where)
                    self._manifest = read_object(path / _MANIFEST if path.is_dir() else path) or {}
        return count((self._manifest or {}).get("num_samples"))


def _state(run: RunFiles, done: dict[str, Any] | None, pace: float | None) -> tuple[State, str]:
    if done is not None:
        return ("stopped early", "because no evaluation was better") if done.get("stopped_early") else ("done", "")
    due_s, timeout_s, recipe = None, _STEP_TIMEOUT_S, run.recipe
    if recipe is not None:
        timeout_s = recipe.check.step_timeout_s
        due_s = None if pace is None else min(recipe.logging.every * pace, max(recipe.logging.most_s, pace))
    holds, launches = is_held(run.directory), run.launches  # in this order: an end is noted after ranks have let go
    is_only_here = {socket.gethostname()} == (launches.unfinished_on or {last_holder(run.directory)})
    return judge(holds, launches.last, is_only_here, run.metrics.line_at, due_s, timeout_s, time.time())


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
        return Saved(without_secrets(run.checkpoints_root))
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
    if newest is not None:
        newest = {"step": count(newest.get("step")), **{key: text(newest.get(key)) for key in ("kind", "policy")}}
    return Anomalies(left_out, None if run.recipe is None else run.recipe.anomalies.limit, len(reports), newest)


def _age(at: float) -> float:
    """Seconds since `at`, at least 0, as the clocks of two machines may differ."""
    return max(0.0, time.time() - at)
