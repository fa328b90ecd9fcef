"""Writes a run's metrics to `metrics.jsonl`, and to TensorBoard, Weights & Biases, MLflow and others by Accelerate.

Each tracker has a thread of its own, so that a server that is slow or unreachable delays no step; if one fails, a
warning is printed and the run continues without it.

Steps that are done again, after a crash or a rewind, must not leave the points of the first time. TensorBoard hides
them (`purge_step`). The others cannot take a point back: their run is continued if nothing was logged after the step
that training continues from; otherwise a new one begins with a copy of the lines of `metrics.jsonl` that still count.
`trackers/NAME.json` in the run directory holds a tracker's run and the last step that was logged there.
"""

import importlib.util
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.ground.files.durable import write_text
from vitscale.runs.metrics import OF_EVALUATIONS, MetricsLines, rows_up_to
from vitscale.runs.names import METRICS_FILE
from vitscale.runs.reading import read_object

_FOLDER = "trackers"
_PROJECT = "vitscale"
_STARTED_WITHIN_S = 10.0  # after that training begins without waiting for the trackers
_ENDED_WITHIN_S = 20.0  # less than the half minute that schedulers give a process to end

_log = logging.getLogger(__name__)


def absent_packages(names: Sequence[str]) -> list[str]:
    """The packages that these trackers need and this machine lacks, as `pip install` calls them."""
    return [name.replace("_", "-") for name in names if importlib.util.find_spec(name) is None]


def named(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by the names that trackers show: `train/loss`, `eval/validation/top1`."""
    return {
        key if key.startswith(OF_EVALUATIONS) else f"train/{key}": value
        for key, value in line.items()
        if isinstance(value, int | float) and key != "step"
    }


class MetricsWriter(MetricsLines):
    """Appends to the metrics of one run, for rank 0; the trackers get the same. A write that fails is reported once.

    Args:
        run_dir: the run's directory; must exist.
        resume_step: the step that training continues from, 0 for a new run.
        trackers: names as in `logging.trackers`; installed.
    """

    def __init__(self, run_dir: Path, resume_step: int, trackers: Sequence[str]) -> None:
        super().__init__(run_dir / METRICS_FILE, resume_step)
        self._followers = [_Follower(name, run_dir, resume_step) for name in trackers]
        for follower, seconds in _within(_STARTED_WITHIN_S, self._followers):
            follower.has_begun.wait(seconds)

    def training(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the metrics of training after `step` updates."""
        super().training(step, values)
        self._put((step, named(values)))

    def _put(self, item: "_Item | None") -> None:
        for follower in self._followers:
            follower.items.put(item)

    def close(self) -> None:
        """Have the trackers write out what they still hold."""
        self._put(None)
        for follower, seconds in _within(_ENDED_WITHIN_S, self._followers):
            follower.leave(seconds)


_Item = tuple[int, Mapping[str, float]]  # a step, and its numbers


class _Known(NamedTuple):
    """What an earlier process left: the tracker's run, and the last step that was logged there."""

    run: str | None
    step: int


class _Follower:
    def __init__(self, name: str, run_dir: Path, resume_step: int) -> None:
        self.items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()  # None for the end
        self.has_begun = threading.Event()  # or has failed
        self._name, self._run_dir, self._resume_step = name, run_dir, resume_step
        self._known_file = run_dir / _FOLDER / f"{name}.json"
        self._known = _Known(None, 0)
        self._is_left = False
        # A daemon: the process can end while a server does not answer.
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def leave(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread to end; after that it is left to itself."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._is_left = True
            _log.warning("logging.trackers: %s does not answer: its last points are missing", self._name)

    def _follow(self) -> None:
        try:
            tracker = self._begin()
            self.has_begun.set()
            while (item := self.items.get()) is not None:
                self._log(tracker, *item)
            tracker.finish()
        except (Exception, SystemExit) as error:  # libraries raise what they like, and none of it is worth a run
            if not self._is_left:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("logging.trackers: training continues without %s: %s", self._name, reason)
        finally:
            self.has_begun.set()

    def _begin(self) -> Any:
        if self._name == "tensorboard":
            return self._start(None)
        before = self._read_known()
        has_later_points = before.step > self._resume_step
        run = None if has_later_points else before.run
        try:
            tracker = self._start(run)
        except Exception:
            if run is None:
                raise
            run, tracker = None, self._start(None)  # perhaps the run was deleted, or the server is another one
        self._known = before if run is not None else _Known(_run_of(tracker), 0)
        known_before = self._known.step
        for row in rows_up_to(self._run_dir / METRICS_FILE, self._resume_step):
            if row["step"] > known_before:
                self._log(tracker, row["step"], named(row))
        if has_later_points and before.run is not None and self._name == "mlflow":
            import mlflow

            mlflow.delete_run(before.run)  # `mlflow gc` removes it for good; until then it can be restored
        return tracker

    def _start(self, run: str | None) -> Any:
        """Accelerate's tracker of that name, for a new run or an earlier one."""
        from accelerate import tracking  # only users of trackers wait for this import

        # Accelerate's own logger raises an error in processes that Accelerate has not started.
        tracking.logger = logging.getLogger(tracking.__name__)
        kind = tracking.LOGGER_TYPE_TO_CLASS[self._name]
        match self._name:
            case "tensorboard":
                threading.excepthook = _without_traces_of_tensorboard
                tracker = kind("tensorboard", self._run_dir, purge_step=self._resume_step + 1)
            case "mlflow":
                tracker = kind(_PROJECT, run_id=run, run_name=self._run_dir.name)
            case "wandb":
                project, resume = os.environ.get("WANDB_PROJECT", _PROJECT), None if run is None else "allow"
                tracker = kind(project, name=self._run_dir.name, id=run, resume=resume, dir=str(self._run_dir))
            case _:
                tracker = kind(_PROJECT, str(self._run_dir)) if kind.requires_logging_directory else kind(_PROJECT)
        tracker.main_process_only = False  # there is one process with trackers; do not ask Accelerate which
        tracker.start()
        return tracker

    def _log(self, tracker: Any, step: int, values: Mapping[str, float]) -> None:
        if self._is_left:  # another follower may have this run by now
            return
        if self._name != "tensorboard" and step > self._known.step:
            # Written before the point: a crash between the two may lose the point, but never leaves one that nobody
            # knows of.
            self._known = self._known._replace(step=step)
            self._known_file.parent.mkdir(exist_ok=True)
            write_text(self._known_file, json.dumps(self._known._asdict()) + "\n")
        tracker.log(values, step=step)

    def _read_known(self) -> _Known:
        known = read_object(self._known_file) or {}
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            return _Known(None if known["run"] is None else str(known["run"]), int(known["step"]))
        return _Known(None, 0)


def _run_of(tracker: Any) -> str | None:
    """What another process needs to continue a tracker's run; None for trackers that are not known to support it."""
    match tracker.name:
        case "mlflow":
            return str(tracker.tracker.info.run_id)
        case "wandb":
            return str(tracker.tracker.id)
    return None


def _within(seconds: float, followers: Sequence[_Follower]) -> Iterator[tuple[_Follower, float]]:
    """The followers, each with what is left of the time that they share."""
    deadline = time.monotonic() + seconds
    for follower in followers:
        yield follower, max(0.0, deadline - time.monotonic())


def _without_traces_of_tensorboard(arguments: threading.ExceptHookArgs) -> None:
    """Print no trace: TensorBoard's writing thread hands an error to the next call, which reports it."""
    is_tensorboards = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (is_tensorboards and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)
