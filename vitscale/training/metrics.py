"""What a run reports: `metrics.jsonl` and TensorBoard, in the run directory."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.runs.metrics import MetricsLines
from vitscale.runs.names import METRICS_FILE

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TENSORBOARD_DIR = "tensorboard"


class MetricsWriter:
    """Appends to the metrics of one run; rank 0 alone has one. A write that fails is reported once, as in MetricsLines.

    Args:
        run_dir: the run's directory; must exist.
        resume_step: the step that training continues from, 0 for a new run.
        tensorboard: whether to write `tensorboard/` too.
    """

    def __init__(self, run_dir: Path, resume_step: int, tensorboard: bool) -> None:
        self._lines = MetricsLines(run_dir / METRICS_FILE, resume_step)
        self._tensorboard: SummaryWriter | None = None
        if tensorboard:
            try:
                self._tensorboard = _open_tensorboard(run_dir / TENSORBOARD_DIR, resume_step)
            except OSError as error:
                self._lines.report(error)

    def training(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the metrics of training after `step` updates."""
        self._lines.training(step, values)
        self._to_tensorboard(step, {f"train/{key}": value for key, value in values.items()})

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what `evaluation.evaluate` returned after `step` updates."""
        self._lines.evaluation(step, values)
        self._to_tensorboard(step, {f"eval/{key}": value for key, value in values.items()})

    def close(self) -> None:
        """Write out what TensorBoard still holds in memory."""
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                self._lines.report(error)
            self._tensorboard = None

    def _to_tensorboard(self, step: int, values: Mapping[str, float | str]) -> None:
        if self._tensorboard is None:
            return
        try:
            for key, value in values.items():
                if not isinstance(value, str):
                    self._tensorboard.add_scalar(key, value, step)
        except OSError as error:
            self._lines.report(error)
            self._tensorboard = None  # its writing thread has died


def _open_tensorboard(directory: Path, resume_step: int) -> "SummaryWriter":
    # Imported here: it takes a second that runs without it need not wait.
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _without_traces_of_tensorboard
    return SummaryWriter(str(directory), purge_step=resume_step + 1)


def _without_traces_of_tensorboard(arguments: threading.ExceptHookArgs) -> None:
    """Its writing thread hands an error to the next call, which reports it."""
    is_tensorboards = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (is_tensorboards and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)
