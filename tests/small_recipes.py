"""Recipes in memory, of data that nobody reads, and objectives of them with values and keys."""

import numpy as np
import torch

from vitscale.models import initial_value
from vitscale.recipe import Recipe, override, validate_recipe

SMALL = {"patch_size": 8, "width": 24, "depth": 2, "mlp_dim": 32, "num_heads": 2}


DINO = {"kind": "dino", "group": 4, "prototypes": 24, "hidden": 20, "bottleneck": 8, "ibot": {"prototypes": 20}}


def small_recipe(model: dict, *settings: str, data: dict | None = None, batch: int = 8, **blocks: object) -> Recipe:
    """In fp32, on 32 x 32 pixels: `data`, other blocks, and then `settings` as of the command line change it."""
    content = {
        **{"model": model, "data": {"train": "none", "image_size": 32, **(data or {})}, "batch": {"global": batch}},
        **{"optimizer": {"name": "adamw", "lr": 1.0}, "schedule": {"duration": {"steps": 1}}, "precision": "fp32"},
    }
    return override(validate_recipe(content | blocks, "test").dump(), settings, "test")


def keys(count: int, seed: int = 0) -> np.ndarray:
    """Keys of samples, int64 (count,)."""
    return np.random.default_rng(seed).integers(-(2**63), 2**63, count, dtype=np.int64)


def with_random_values(module: torch.nn.Module) -> torch.nn.Module:
    """None of them zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def with_initial_values(objective: torch.nn.Module, factor: float = 1.0) -> torch.nn.Module:
    """As a run begins, times a factor."""
    with torch.no_grad():
        for name, parameter in objective.named_weights():
            parameter.copy_(factor * initial_value(objective, name, parameter.shape, 0))
    return objective
