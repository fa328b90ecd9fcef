"""The training that benchmarks of a step measure: 224 x 224 pixels, AdamW, clipping, bf16, softmax."""

from typing import Any

from vitscale.recipe import Recipe, validate_recipe

SIDE = 224


def make_recipe(
    name: str,
    batch: int,
    ranks: int = 1,
    *,
    num_classes: int | None = None,
    folder: str = "",
    precision: str = "bf16",
    **blocks: Any,
) -> Recipe:
    """A recipe without accumulation.

    Args:
        name: of the model.
        batch: images of each rank.
        num_classes: None for those of the dataset `train` in `folder`.
        precision: of the recipe.
        blocks: added to the recipe's own, key by key.
    """
    content: dict[str, Any] = {
        "model": {"name": name, "head": "linear", "num_classes": num_classes},
        "data": {"train": "train", "root": folder, "image_size": SIDE},
        "batch": {"global": batch * ranks, "micro_max": batch},
        "objective": {"loss": "softmax"},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"duration": {"steps": 100_000}, "warmup": {"steps": 10}},
        "logging": {"tensorboard": False},
        "precision": precision,
    }
    for key, block in blocks.items():
        content[key] = {**content.get(key, {}), **block}
    return validate_recipe(content, "benchmark")
