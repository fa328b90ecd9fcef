"""Works out a run for this world size and these data: everything that can be checked before the ranks meet.

All of it is a function of the recipe, the manifests and the world size, so that a mistake ends the command at once,
without a process group, a model or a first step.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from vitscale.data.loader import Loader, training_loader, training_order
from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.evaluation import Evaluator, build_evaluators
from vitscale.ground.errors import RecipeError
from vitscale.objectives import objective_class
from vitscale.recipe import Average, Course, Duration, Recipe
from vitscale.training.deepspeed.config import derive_config
from vitscale.training.deepspeed.distributed import World
from vitscale.training.optimizers.schedule import Rates, course, learning_rate


class Due(NamedTuple):
    """What to do after an update (an audit: while it is made); a function of the step alone."""

    log: bool
    audit: bool
    compare_replicas: bool
    compare_computation: bool
    save: bool
    evaluate: bool


@dataclass(frozen=True)
class RunPlan:
    """A recipe worked out in steps."""

    recipe: Recipe
    manifest: Manifest  # of the training data
    order: TrainOrder  # in which they are read
    num_classes: int  # of the training data, for the objective
    micro_batch: int  # each rank's samples in a micro-batch
    accumulation: int  # micro-batches in a step
    config: dict[str, Any]  # DeepSpeed's
    evaluators: list[Evaluator]  # in the order in which they run
    total_steps: int  # of the whole run
    evaluate_every: int | None  # steps; None for at the end only
    checkpoint_every: int | None  # steps; None for at the end only
    keep_every: int | None  # steps between checkpoints that are kept for good; None for none
    tail: int | None  # the step shortly before the end whose checkpoint is kept, too; None for none
    rates: Callable[[int], Rates]  # the number of updates done -> the rates of the next one
    warnings: list[str]  # of what is allowed, but hardly meant
    working_directory: str | None  # what a relative `data.root` is relative to; None if it was deleted

    def due(self, step: int, last: int) -> Due:
        """What is due when `step` updates are done, in a process that ends after `last`."""

        def is_at(every: int | None) -> bool:
            return every is not None and step % every == 0

        return Due(
            log=is_at(self.recipe.logging.every),
            audit=is_at(self.recipe.check.audit_every),
            compare_replicas=is_at(self.recipe.check.replicas_every),
            compare_computation=is_at(self.recipe.check.recompute_every),
            save=step in (last, self.tail) or is_at(self.checkpoint_every),
            evaluate=step == self.total_steps or is_at(self.evaluate_every),
        )


def open_loader(plan: RunPlan, world: World, start: int, stop: int) -> Loader:
    """A rank's batches at positions [start, stop) of the order."""
    return training_loader(
        plan.recipe,
        plan.manifest,
        plan.order,
        rank=world.rank,
        world=world.size,
        start=start,
        stop=stop,
        pinned=world.device.type == "cuda",
        digest=plan.recipe.logging.batch_digest,
    )


def plan_run(recipe: Recipe, rank: int, world_size: int) -> RunPlan:
    """A rank's part of a run. Raises `RecipeError` for mistakes in the recipe, `DataError` for faults of the data."""
    micro_batch, accumulation = recipe.split(world_size)
    config = derive_config(recipe, world_size)
    manifest = Manifest.load(recipe.dataset_path(recipe.data.train))
    num_classes = objective_class(recipe).num_outputs(recipe, manifest)
    order = training_order(recipe, manifest)

    def interval(key: str, duration: Duration | None) -> int | None:
        return None if duration is None else _steps(recipe, manifest.num_samples, key, duration)

    total, rates = schedule_in_steps(recipe, manifest.num_samples)
    warnings = [*_schedule_warnings(recipe, total, manifest.num_samples), *filter(None, [recipe.describe_border()])]
    checkpoint_every = interval("checkpoint.every", recipe.checkpoint.every)
    tail = total - (interval("checkpoint.tail", recipe.checkpoint.tail) or 0)
    last_regular = 0 if checkpoint_every is None else (total - 1) // checkpoint_every * checkpoint_every
    working_directory = None
    with suppress(FileNotFoundError):
        working_directory = str(Path.cwd())
    return RunPlan(
        recipe=recipe,
        manifest=manifest,
        order=order,
        num_classes=num_classes,
        micro_batch=micro_batch,
        accumulation=accumulation,
        config=config,
        evaluators=build_evaluators(recipe, manifest.class_names, rank=rank, world=world_size),
        total_steps=total,
        evaluate_every=interval("evaluation.every", recipe.evaluation.every),
        checkpoint_every=checkpoint_every,
        keep_every=interval("checkpoint.keep_every", recipe.checkpoint.keep_every),
        tail=tail if max(recipe.first_step, last_regular) < tail < total else None,
        rates=rates,
        warnings=warnings,
        working_directory=working_directory,
    )


def schedule_in_steps(recipe: Recipe, num_samples: int) -> tuple[int, Callable[[int], Rates]]:
    """The steps of a run on `num_samples` samples, and its rates by the number of updates done.

    Raises `RecipeError` for a part of the schedule that is shorter than one step.
    """
    schedule, optimizer = recipe.schedule, recipe.optimizer

    def interval(key: str, duration: Duration) -> int:
        return _steps(recipe, num_samples, key, duration)

    def steps(duration: Duration) -> int:
        return duration.to_steps(num_samples, recipe.batch.global_size)

    def figure(key: str, start: float, settings: Course | None) -> Callable[[int], float | None]:
        if settings is None:
            return lambda step: None
        length = total if settings.over is None else interval(f"{key}.over", settings.over)
        return partial(course, start=start, end=settings.to, steps=length, shape=settings.shape)

    total = interval("schedule.duration", schedule.duration)
    rate = partial(
        learning_rate,
        base=optimizer.lr,
        total=total,
        warmup=steps(schedule.warmup),
        decay=schedule.decay,
        end=schedule.end_lr,
        floor=schedule.min_lr,
        boundaries=[steps(boundary) for boundary in schedule.boundaries],
        factor=schedule.factor,
        cooldown=steps(schedule.cooldown),
        cooldown_shape=schedule.cooldown_shape,
        timescale=interval("schedule.timescale", schedule.timescale),
        cycle=total if schedule.cycle is None else interval("schedule.cycle", schedule.cycle),
        cycle_factor=schedule.cycle_factor,
        restart_factor=schedule.restart_factor,
    )

    def kept(key: str, average: Average) -> Callable[[int], float]:
        if average.decay is None:
            every, first = interval(f"{key}.every", cast(Duration, average.every)), steps(average.start)
            return lambda step: float(step + 1 < first or (step + 1 - first) % every != 0)
        length = total if average.over is None else interval(f"{key}.over", average.over)
        end = average.decay if average.to is None else average.to
        share = partial(course, start=average.decay, end=end, steps=length, shape=average.shape)
        return (lambda step: min(share(step), (2 + step) / (11 + step))) if average.warmup else share

    decay = figure("schedule.weight_decay", optimizer.weight_decay, schedule.weight_decay)
    momentum = figure("schedule.momentum", optimizer.first_momentum, schedule.momentum)
    begins = {number: steps(group.begin) for number, group in enumerate(optimizer.groups)}
    averages = {each.name: kept(f"averages ({each.name})", each) for each in recipe.all_averages}
    courses = recipe.objective.courses.items()
    scalars = {name: figure(f"objective.{name}", ramp.start, ramp) for name, ramp in courses}

    def rates(step: int) -> Rates:
        decayed = decay(step)
        return Rates(
            step,
            rate(step),
            None if decayed is None else decayed / optimizer.weight_decay,
            momentum(step),
            frozenset(number for number, begin in begins.items() if step < begin),
            {name: of_average(step) for name, of_average in averages.items()},
            {name: cast(float, scalar(step)) for name, scalar in scalars.items()},
            frozenset(each.name for each in recipe.all_averages if step < steps(each.start)),
        )

    return total, rates


def _steps(recipe: Recipe, num_samples: int, key: str, duration: Duration) -> int:
    """A duration above zero in steps. Raises `RecipeError` for less than one."""
    steps = duration.to_steps(num_samples, recipe.batch.global_size)
    if steps < 1:
        raise RecipeError(f"{key}: {duration.describe()} is less than one step of {recipe.batch.global_size} samples")
    return steps


def _schedule_warnings(recipe: Recipe, total: int, num_samples: int) -> Iterator[str]:
    def steps(duration: Duration) -> int:
        return duration.to_steps(num_samples, recipe.batch.global_size)

    whole = f"steps and the whole run {total:,}"
    warmup, cooldown = steps(recipe.schedule.warmup), steps(recipe.schedule.cooldown)
    if warmup + cooldown > total:
        cooling = f" steps, schedule.cooldown {cooldown:,} and the whole run {total:,}" if cooldown else f" {whole}"
        yield f"schedule.warmup is {warmup:,}{cooling}: the learning rate never reaches optimizer.lr"
    for number, group in enumerate(recipe.optimizer.groups):
        if (begin := steps(group.begin)) >= total:
            yield f"optimizer.groups.{number}.begin is {begin:,} {whole}: its parameters never change"
    for average in recipe.averages:
        if average.every is not None and (first := steps(average.start) or steps(average.every)) > total:
            yield f"averages ({average.name}) first becomes a copy after {first:,} {whole}: it never does"
