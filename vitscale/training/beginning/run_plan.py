"""Works out a run for this world size and these data: everything that can be checked before the ranks meet.

All of it is a function of the recipe, the manifests and the world size, so that a mistake ends the command at once,
without a process group, a model or a first step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.data.loader import Loader, training_loader, training_order
from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.evaluation import Evaluator, build_evaluators
from vitscale.evaluation.build import evaluation_loader
from vitscale.ground.errors import RecipeError
from vitscale.objectives import objective_class
from vitscale.recipe import Course, Duration, Recipe
from vitscale.training.beginning.inspections import Inspections
from vitscale.training.deepspeed.distributed import World
from vitscale.training.deepspeed.engine import derive_config
from vitscale.training.optimizers.schedule import Rates, course, learning_rate


class Due(NamedTuple):
    """What to do after an update (an audit: while it is made); a function of the step alone."""

    log: bool
    audit: bool
    compare_replicas: bool
    compare_computation: bool
    save: bool
    evaluate: bool
    inspect: bool


@dataclass(frozen=True)
class RunPlan:
    """A recipe worked out in steps.

    Attributes:
        manifest, order: the training data's manifest, and the order in which they are read.
        num_classes: the number of classes of the training data, for the objective.
        micro_batch, accumulation: each rank's samples in a micro-batch, and micro-batches in a step.
        config: DeepSpeed's configuration.
        evaluators: in the order in which they run.
        inspections: those of `evaluation.inspect`; None without it.
        total_steps: steps of the whole run.
        evaluate_every, checkpoint_every: steps; None for at the end only.
        inspect_every: steps; None for never.
        keep_every: the interval, in steps, of checkpoints that are kept for good; None for none.
        tail: the step shortly before the end whose checkpoint is kept, too; None for none.
        log_every, audit_every, compare_replicas_every, compare_computation_every: steps; None for never.
        rates: the number of updates done -> the rates of the next one.
        warnings: what is allowed, but hardly meant.
        working_directory: what a relative `data.root` is relative to; None if it was deleted.
    """

    manifest: Manifest
    order: TrainOrder
    num_classes: int
    micro_batch: int
    accumulation: int
    config: dict[str, Any]
    evaluators: list[Evaluator]
    inspections: Inspections | None
    total_steps: int
    evaluate_every: int | None
    inspect_every: int | None
    checkpoint_every: int | None
    keep_every: int | None
    tail: int | None
    log_every: int
    audit_every: int | None
    compare_replicas_every: int | None
    compare_computation_every: int | None
    rates: Callable[[int], Rates]
    warnings: list[str]
    working_directory: str | None

    def due(self, step: int, last: int) -> Due:
        """What is due when `step` updates are done, in a process that ends after `last`."""

        def is_at(every: int | None) -> bool:
            return every is not None and step % every == 0

        return Due(
            log=is_at(self.log_every),
            audit=is_at(self.audit_every),
            compare_replicas=is_at(self.compare_replicas_every),
            compare_computation=is_at(self.compare_computation_every),
            save=step in (last, self.tail) or is_at(self.checkpoint_every),
            evaluate=step == self.total_steps or is_at(self.evaluate_every),
            inspect=is_at(self.inspect_every),
        )


def open_loader(recipe: Recipe, plan: RunPlan, world: World, start: int, stop: int) -> Loader:
    """A rank's batches at positions [start, stop) of the order."""
    return training_loader(
        recipe,
        plan.manifest,
        plan.order,
        rank=world.rank,
        world=world.size,
        start=start,
        stop=stop,
        pinned=world.device.type == "cuda",
        digest=recipe.logging.batch_digest,
    )


def plan_run(recipe: Recipe, rank: int, world_size: int) -> RunPlan:
    """Work out one rank's part of a run.

    Raises `RecipeError` for mistakes in the recipe, `DataError` for faults of the data.
    """
    micro_batch, accumulation = recipe.split(world_size)
    config = derive_config(recipe, world_size)
    manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    num_classes = objective_class(recipe).num_outputs(recipe, manifest)
    order = training_order(recipe, manifest)

    def interval(key: str, duration: Duration | None) -> int | None:
        return None if duration is None else _steps(recipe, manifest.num_samples, key, duration)

    total, rates = schedule_in_steps(recipe, manifest.num_samples)
    warnings = _schedule_warnings(recipe, total, manifest.num_samples)
    border = recipe.describe_border()
    warnings += [border] if border else []
    inspect = recipe.evaluation.inspect
    checkpoint_every = interval("checkpoint.every", recipe.checkpoint.every)
    tail = total - (interval("checkpoint.tail", recipe.checkpoint.tail) or 0)
    last_regular = 0 if checkpoint_every is None else (total - 1) // checkpoint_every * checkpoint_every

    return RunPlan(
        manifest=manifest,
        order=order,
        num_classes=num_classes,
        micro_batch=micro_batch,
        accumulation=accumulation,
        config=config,
        evaluators=build_evaluators(recipe, manifest.class_names, rank=rank, world=world_size),
        inspections=_inspections(recipe, rank, world_size),
        total_steps=total,
        evaluate_every=interval("evaluation.every", recipe.evaluation.every),
        inspect_every=interval("evaluation.inspect.every", None if inspect is None else inspect.every),
        checkpoint_every=checkpoint_every,
        keep_every=interval("checkpoint.keep_every", recipe.checkpoint.keep_every),
        tail=tail if max(recipe.first_step, last_regular) < tail < total else None,
        log_every=recipe.logging.every,
        audit_every=recipe.check.audit_every,
        compare_replicas_every=recipe.check.replicas_every,
        compare_computation_every=recipe.check.recompute_every,
        rates=rates,
        warnings=warnings,
        working_directory=_working_directory(),
    )


def schedule_in_steps(recipe: Recipe, num_samples: int) -> tuple[int, Callable[[int], Rates]]:
    """The steps of a run on `num_samples` samples, and its rates by the number of updates done.

    Raises `RecipeError` for a part of the schedule that is shorter than one step.
    """
    schedule, optimizer = recipe.schedule, recipe.optimizer

    def interval(key: str, duration: Duration) -> int:
        return _steps(recipe, num_samples, f"schedule.{key}", duration)

    def steps(duration: Duration) -> int:
        return duration.to_steps(num_samples, recipe.batch.global_size)

    def figure(key: str, start: float, settings: Course | None) -> Callable[[int], float | None]:
        if settings is None:
            return lambda step: None
        length = total if settings.over is None else interval(f"{key}.over", settings.over)
        return partial(course, start=start, end=settings.to, steps=length, shape=settings.shape)

    total = interval("duration", schedule.duration)
    rate = partial(
        learning_rate,
        base=optimizer.lr,
        total=total,
        warmup=steps(schedule.warmup),
        decay=schedule.decay,
        end=schedule.end_lr,
        boundaries=[steps(boundary) for boundary in schedule.boundaries],
        factor=schedule.factor,
        cooldown=steps(schedule.cooldown),
        cooldown_shape=schedule.cooldown_shape,
        timescale=interval("timescale", schedule.timescale),
        cycle=total if schedule.cycle is None else interval("cycle", schedule.cycle),
        cycle_factor=schedule.cycle_factor,
        restart_factor=schedule.restart_factor,
    )
    decay = figure("weight_decay", optimizer.weight_decay, schedule.weight_decay)
    momentum = figure("momentum", optimizer.first_momentum, schedule.momentum)

    def rates(step: int) -> Rates:
        decayed = decay(step)
        return Rates(step, rate(step), None if decayed is None else decayed / optimizer.weight_decay, momentum(step))

    return total, rates


def _steps(recipe: Recipe, num_samples: int, key: str, duration: Duration) -> int:
    """A duration above zero in steps. Raises `RecipeError` for less than one."""
    steps = duration.to_steps(num_samples, recipe.batch.global_size)
    if steps < 1:
        raise RecipeError(f"{key}: {duration.describe()} is less than one step of {recipe.batch.global_size} samples")
    return steps


def _schedule_warnings(recipe: Recipe, total: int, num_samples: int) -> list[str]:
    schedule = recipe.schedule
    warmup, cooldown = (
        part.to_steps(num_samples, recipe.batch.global_size) for part in (schedule.warmup, schedule.cooldown)
    )
    if warmup > total or warmup + cooldown > total:
        cooling = f", schedule.cooldown {cooldown:,}" if cooldown else ""
        return [
            f"schedule.warmup is {warmup:,} steps{cooling} and the whole run {total:,}: the learning rate never "
            f"reaches optimizer.lr"
        ]
    return []


def _inspections(recipe: Recipe, rank: int, world_size: int) -> Inspections | None:
    inspect = recipe.evaluation.inspect
    if inspect is None:
        return None
    manifest = Manifest.load(recipe.dataset_path(inspect.images))
    make_loader = evaluation_loader(recipe, manifest, recipe.data.eval_crop, rank=rank, world=world_size)
    return Inspections(make_loader, math.ceil(inspect.count / (recipe.evaluation.batch * world_size)))


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None
