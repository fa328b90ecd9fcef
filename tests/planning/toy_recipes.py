"""Recipes whose memory is looked at; nothing here reads data."""

from typing import Any

from vitscale.recipe import Recipe, validate_recipe


def make_recipe(model: dict[str, Any], image_size: int = 224, micro_batch: int = 2, **blocks: Any) -> Recipe:
    """A recipe of a model, for one rank without accumulation unless `batch` says otherwise; in bf16 on any machine."""
    content = {
        **{"precision": "bf16", "model": model, "data": {"train": "train", "image_size": image_size}},
        **{"batch": {"global": micro_batch, "micro_max": micro_batch}, "optimizer": {"name": "adamw", "lr": 1e-3}},
        "schedule": {"duration": {"steps": 3}},
    }
    return validate_recipe(content | blocks, "test")
