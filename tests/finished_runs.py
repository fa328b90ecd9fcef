"""Evaluates a finished run as `vitscale evaluate` does, and opens its checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vitscale.evaluation.finished import FinishedModel, empty_objective, evaluate_finished, stored_values
from vitscale.evaluation.placing import fill
from vitscale.models import weight_dtype
from vitscale.objectives import Objective
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint import CheckpointReader


def evaluate_run(
    run_dir: Path, settings: Sequence[str] = (), step: int | None = None, *, use_average: bool = True
) -> tuple[int | None, dict[str, float]]:
    """(step, metrics) of a run's checkpoint by its recipe's evaluators."""
    model = FinishedModel(run_dir, settings, step, use_average=use_average)
    return model.step, evaluate_finished(model)


def load_model(recipe: Recipe, reader: CheckpointReader, *, use_average: bool = True) -> Objective:
    """A checkpoint's objective on the CPU, in evaluation mode and the precision it was trained in."""
    model = empty_objective(recipe, reader).to(weight_dtype(recipe)).eval()
    return fill(model, stored_values(model, reader, use_average), torch.device("cpu"))
