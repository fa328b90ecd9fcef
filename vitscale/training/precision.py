"""Chooses the precision of a run whose recipe leaves it to the device (`precision: auto`)."""

import time
from pathlib import Path
from statistics import median

import torch

from vitscale.machine import has_bf16_instructions
from vitscale.recipe import Recipe, override, read_recipe
from vitscale.runs.names import RECIPE_FILE

_MATRIX_SIDE = 192  # the width of ViT-Ti: small enough that slow arithmetic takes milliseconds
_ROUNDS = 5


def settle_precision(recipe: Recipe, run_dir: Path, local_rank: int) -> tuple[Recipe, str | None]:
    """The recipe with its precision settled, and what was chosen and why, in words; None if the recipe names it itself.

    A run keeps what it began with; a new one gets bf16 if the device of this rank computes it, else fp32.
    Raises `RecipeError` if the recipe does not go with that precision, or the run's own recipe cannot be read.
    """
    if recipe.precision != "auto":
        return recipe, None
    saved = run_dir / RECIPE_FILE
    if saved.exists() and (began_with := read_recipe(saved).precision) != "auto":
        precision, reason = began_with, "which this run began with"
    elif torch.cuda.is_available():
        device = local_rank % torch.cuda.device_count()
        computes = torch.cuda.get_device_properties(device).major >= 8 or torch.version.hip is not None
        precision = "bf16" if computes else "fp32"
        reason = f"which {torch.cuda.get_device_name(device)} computes{'' if computes else '; it has no bf16'}"
    elif has_bf16_instructions():
        precision, reason = "bf16", "for which this processor has instructions"
    else:
        precision, reason = "fp32", "as this processor has no instructions for bf16"
    settled = override(recipe.dump(), [f"precision={precision}"], f"with precision {precision}, {reason}, the recipe")
    return settled, f"precision {precision}, {reason}"


def slowness_of_bf16() -> float:
    """The time of a matrix product in bf16 over that in fp32 on this CPU, from a quick measurement."""
    return _product_s(torch.bfloat16) / _product_s(torch.float32)


def _product_s(dtype: torch.dtype) -> float:
    """Median seconds of a product of matrices."""
    factor = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, dtype=dtype)
    factor @ factor  # the first one sets the arithmetic up
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        factor @ factor
        seconds.append(time.perf_counter() - began)
    return median(seconds)
