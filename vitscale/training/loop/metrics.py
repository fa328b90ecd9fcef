"""Writes a run's metrics: to `metrics.jsonl` in the run directory, and the same to trackers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitscale.runs.metrics import OF_EVALUATIONS, MetricsLines
from vitscale.runs.names import METRICS_FILE
from vitscale.training.watching.trackers import Trackers


class MetricsWriter:
    """Appends to the metrics of one run; rank 0 alone has one. A write that fails is reported once, as in MetricsLines.

    Args:
        run_dir: the run's directory; must exist.
        resume_step: the step that training continues from, 0 for a new run.
        trackers: names of the trackers that get the same, as in `logging.trackers`.
    """

    def __init__(self, run_dir: Path, resume_step: int, trackers: Sequence[str]) -> None:
        self._lines = MetricsLines(run_dir / METRICS_FILE, resume_step)
        self._trackers = Trackers(trackers, run_dir, resume_step)

    def training(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the metrics of training after `step` updates."""
        self._lines.training(step, values)
        self._trackers.log(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what `evaluation.evaluate` returned after `step` updates."""
        self._lines.evaluation(step, values)
        self._trackers.log(step, {f"{OF_EVALUATIONS}{key}": value for key, value in values.items()})

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Hand pictures uint8 (height, width, 3) to the trackers."""
        self._trackers.draw(step, pictures)

    def close(self) -> None:
        """Write out what trackers still hold in memory."""
        self._trackers.close()
