"""Evaluates a finished run as `vitscale evaluate` does, without printing."""

from collections.abc import Sequence
from pathlib import Path

from vitscale.evaluation.finished import FinishedModel, evaluate_finished


def evaluate_run(
    run_dir: Path, settings: Sequence[str] = (), step: int | None = None, *, use_average: bool = True
) -> tuple[int | None, dict[str, float]]:
    """(step, metrics) of a run's checkpoint by its recipe's evaluators."""
    model = FinishedModel(run_dir, settings, step, use_average=use_average)
    return model.step, evaluate_finished(model)
