"""What a run amounts to on this world and this data: everything that can be checked before the ranks meet.

All of it is a function of the recipe, the manifests and the world size, so that a mistake ends the command at once,
without a process group, a model or a first step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitscale.data import TrainOrder
from vitscale.errors import DataError, RecipeError
from vitscale.evaluation import Evaluator, build_evaluators
from vitscale.objectives import Classification
from vitscale.recipe import Duration, Recipe
from vitscale.shards import Manifest
from vitscale.training.engine import derive_config
from vitscale.training.schedule import learning_rate


@dataclass(frozen=True)
class Plan:
    """A recipe in steps.

    Attributes:
        manifest, order: of the training data.
        num_classes: outputs of the model.
        objective: per-sample losses.
        micro_batch, accumulation: of each rank.
        config: DeepSpeed's.
        evaluators: in the order in which they run.
        total_steps: of the whole run.
        evaluate_every, checkpoint_every: steps; None for at the end only.
        keep_every: steps whose checkpoints are kept for good; None for none.
        learning_rate: of the update that follows so many steps.
        warnings: what is possible, but hardly meant.
    """

    manifest: Manifest
    order: TrainOrder
    num_classes: int
    objective: Classification
    micro_batch: int
    accumulation: int
    config: dict[str, Any]
    evaluators: list[Evaluator]
    total_steps: int
    evaluate_every: int | None
    checkpoint_every: int | None
    keep_every: int | None
    learning_rate: Callable[[int], float]
    warnings: list[str]


def plan_run(recipe: Recipe, rank: int, world_size: int) -> Plan:
    """Work out one rank's part of a run.

    Raises `RecipeError` for what the recipe says, `DataError` for what the data hold.
    """
    micro_batch, accumulation = recipe.batch.split(world_size)
    config = derive_config(recipe, world_size)
    manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    num_classes = _num_classes(recipe, manifest)
    global_batch = recipe.batch.global_size
    order = TrainOrder([shard.num_selected for shard in manifest.shards], global_batch, recipe.seed)

    def steps(duration: Duration) -> int:
        return duration.to_steps(manifest.num_samples, global_batch)

    def interval(key: str, duration: Duration | None) -> int | None:
        if duration is not None and steps(duration) < 1:
            raise RecipeError(f"{key}: {duration.describe()} is less than one step of {global_batch} samples")
        return None if duration is None else steps(duration)

    schedule = recipe.schedule
    total, warmup = interval("schedule.duration", schedule.duration), steps(schedule.warmup)
    assert total is not None
    warnings: list[str] = []
    if warmup > total:
        warnings.append(
            f"schedule.warmup is {warmup:,} steps and the whole run {total:,}: the learning rate never reaches "
            f"optimizer.lr"
        )
    border = recipe.describe_border()
    warnings += [border] if border else []
    boundaries = [steps(boundary) for boundary in schedule.boundaries]

    def rate(step: int) -> float:
        return learning_rate(
            step,
            base=recipe.optimizer.lr,
            total=total,
            warmup=warmup,
            decay=schedule.decay,
            end=schedule.end_lr,
            boundaries=boundaries,
            factor=schedule.factor,
        )

    return Plan(
        manifest=manifest,
        order=order,
        num_classes=num_classes,
        objective=Classification(recipe.objective.loss, recipe.objective.on, recipe.objective.off),
        micro_batch=micro_batch,
        accumulation=accumulation,
        config=config,
        evaluators=build_evaluators(recipe, manifest.class_names, rank=rank, world=world_size),
        total_steps=total,
        evaluate_every=interval("evaluation.every", recipe.evaluation.every),
        checkpoint_every=interval("checkpoint.every", recipe.checkpoint.every),
        keep_every=interval("checkpoint.keep_every", recipe.checkpoint.keep_every),
        learning_rate=rate,
        warnings=warnings,
    )


def _num_classes(recipe: Recipe, manifest: Manifest) -> int:
    named = len(manifest.class_names)
    if named == 0:
        raise DataError(f"{manifest.where} names no classes; convert the data with class folders or --classes")
    if recipe.model.num_classes not in (None, named):
        raise RecipeError(
            f"{manifest.where} names {named} classes, the recipe's model.num_classes is {recipe.model.num_classes}; "
            f"leave it out (--set model.num_classes=null) to take the dataset's"
        )
    if recipe.objective.loss == "softmax" and named < 2:
        raise DataError(f"{manifest.where}: softmax needs at least two classes, the dataset names {named}")
    if recipe.selection is not None and recipe.selection.metric == "validation/top5" and named <= 5:
        raise RecipeError(f"selection.metric: with {named} classes there is no top-5 accuracy; use validation/top1")
    return named
