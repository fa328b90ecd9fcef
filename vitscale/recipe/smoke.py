"""The smoke form of a recipe: the same model family and code path, shrunk to run in seconds on any machine."""

from pathlib import Path
from typing import Any

from vitscale.recipe.reading import validate_recipe
from vitscale.recipe.schedule import Schedule
from vitscale.recipe.schema import Recipe

SMOKE_STEPS = 4
TRAIN, TEST = "train", "test"
"""The names of a smoke run's datasets, whatever the recipe's are."""


def smoke_form(recipe: Recipe, data_root: Path, world_size: int = 1) -> Recipe:
    """The recipe with a small model of its family, small images, a few images per rank and four steps.

    Everything that selects a code path stays: head, pooling, positions, loss, optimizer, schedule, precision,
    parallelism, evaluators, selection. All data are `train` and `test` under `data_root`. `init` is dropped, because
    weights of the recipe's own model do not fit the small one.
    """
    content = recipe.dump() | {"init": None}
    small, image_size = recipe.model.small()
    patches = recipe.model.patches(image_size)
    if patches is not None and recipe.objective.needs_whole_patches:
        image_size -= image_size % patches.size
    content["model"] |= small | {"num_classes": None}
    content["objective"] = recipe.objective.smoke_form().model_dump(mode="json", by_alias=True)
    content["data"] |= {"train": TRAIN, "root": str(data_root), "image_size": image_size, "threads": 1}
    for view in content["data"].get("views", ()):  # of about as large a share of the image, in whole patches
        if view["size"] not in (None, recipe.data.image_size):
            share, unit = view["size"] / recipe.data.image_size, 1 if patches is None else patches.size
            view["size"] = max(round(image_size * share) // unit, 1) * unit
        else:
            view["size"] = None
    content["batch"] = {"global": max(8, 4 * world_size), "micro_max": 2}
    content["schedule"] |= {
        "duration": {"steps": SMOKE_STEPS},
        "warmup": {"steps": 1},
        "boundaries": [{"steps": 1 + index} for index in range(len(recipe.schedule.boundaries))],
    } | _short_parts(recipe.schedule)
    half = {"steps": SMOKE_STEPS // 2}
    for average in content.get("averages", []):
        average |= {"over": None} if average["every"] is None else {"every": half, "from": {"steps": 1}}
    for group in content["optimizer"]["groups"]:
        group |= {"begin": half} if "begin" in group else {}
    content["checkpoint"]["every"] = {"steps": 2}
    content["logging"] |= {"every": 1, "batch_digest": True}
    evaluation = content["evaluation"]
    if recipe.evaluation.every is not None:
        evaluation["every"] = {"steps": 2}
    if recipe.evaluation.validation is not None:
        evaluation["validation"] = TEST
    if recipe.evaluation.fewshot is not None:
        for task in evaluation["fewshot"]["tasks"]:
            task |= {"train": TRAIN, "test": TEST}
    if recipe.evaluation.knn is not None:
        evaluation["knn"] |= {"train": TRAIN, "test": TEST}
    for number, evaluator in enumerate(recipe.evaluation.evaluators):
        evaluation["evaluators"][number] |= evaluator.on_smoke_data(TRAIN, TEST)
    return validate_recipe(content, "the smoke form")


def _short_parts(schedule: Schedule) -> dict[str, Any]:
    """The other lengths that the schedule's kind of decay has, shortened."""
    one, content = {"steps": 1}, schedule.model_dump(mode="json")
    has = {"cooldown": ("wsd", "rsqrt"), "timescale": ("rsqrt",), "cycle": ("restarts",)}
    short: dict[str, Any] = {key: one for key, kinds in has.items() if schedule.decay in kinds}
    return short | {key: content[key] | {"over": None} for key in ("weight_decay", "momentum") if content[key]}
