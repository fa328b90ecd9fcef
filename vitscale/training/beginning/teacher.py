"""The teacher of a run: a model that the run learns from, whole on every rank and never updated."""

from collections.abc import Callable
from typing import Any

import torch

from vitscale import recipe as recipes
from vitscale.ground.errors import CheckpointError, RecipeError, VitscaleError
from vitscale.models import Model, initialise, weight_dtype
from vitscale.models.weights import load_weights, parameters
from vitscale.objectives import build_teacher
from vitscale.recipe import Recipe
from vitscale.runs.checkpoint.opening import OpenWeights
from vitscale.training.beginning.found_weights import Named, check_classes, check_model, find_weights, open_found
from vitscale.training.deepspeed.distributed import World

_KEY = "objective.teacher"
_ADVICE = "the head of the teacher is needed, with the classes of data.train"


def check_teacher(recipe: Recipe, class_names: list[str]) -> None:
    """Check the teacher by names and shapes alone, before the ranks meet.

    Raises `RecipeError` if there are no such weights or they contradict the recipe, and `CheckpointError` if they are
    damaged or of another model.
    """
    if isinstance(recipe.objective, recipes.Distillation):
        num_classes = recipe.objective.teacher.model.num_classes
        if num_classes not in (None, len(class_names)):
            raise RecipeError(
                f"{_KEY}.model.num_classes is {num_classes}, but data.train has {len(class_names)} "
                "classes, and the teacher's are the same; leave it out"
            )
    if (named := _named(recipe)) is not None:
        with torch.device("meta"):
            teacher = build_teacher(recipe, len(class_names))
        assert teacher is not None
        _check(recipe, class_names, named, find_weights(named), teacher)


def load_teacher(
    recipe: Recipe, class_names: list[str], world: World, say: Callable[[str], None]
) -> tuple[Model | None, dict[str, Any] | None]:
    """The teacher on this rank's device, in the dtype of the run; all ranks call it together.

    `say` prints what is taken from where, on rank 0. Returns the teacher, or None without one; and what identifies its
    weights, None without a source.

    Raises as `check_teacher`, and `CheckpointError` if no checkpoint of a run verifies.
    """
    teacher = build_teacher(recipe, len(class_names))
    if teacher is None:
        return None, None
    named, identity = _named(recipe), None
    if named is None:
        initialise(teacher, recipe.seed)
        say(
            "WARNING: objective.teacher has no from: its weights are random initial values, from which "
            "nothing can be learned"
        )
    else:
        weights = open_found(named, world, say)
        try:
            _check(recipe, class_names, named, weights, teacher)
            load_weights(teacher, weights.source, report=lambda note: None)
        except VitscaleError as error:
            raise error.on_all_ranks() from None
        for note in weights.source.notes:
            say(f"{weights.source.path}: {note}")
        say(f"teacher: {weights.title}")
        identity = weights.identity
    return teacher.to(device=world.device, dtype=weight_dtype(recipe)).requires_grad_(False), identity


def check_same_teacher(now: dict[str, Any] | None, before: dict[str, Any] | None) -> None:
    """Raise `CheckpointError` if a resumed run has another teacher than the checkpoint that it continues from."""
    if now == before:
        return
    files = {name: digest for each in (now, before) if each is not None for name, digest in each["files"].items()}
    raise CheckpointError(
        f"{_KEY}.from: the teacher's weights are not those that this run has learned from so far "
        f"({', '.join(sorted(files)) or 'initial values'}); use those again, or start another run"
    ).on_all_ranks()


def _named(recipe: Recipe) -> Named | None:
    settings = recipe.objective
    if not isinstance(settings, recipes.Distillation) or settings.teacher.source is None:
        return None
    return Named(_KEY, settings.teacher.source, settings.teacher.step)


def _check(recipe: Recipe, class_names: list[str], named: Named, weights: OpenWeights, teacher: Model) -> None:
    assert isinstance(recipe.objective, recipes.Distillation)
    settings = recipe.objective.teacher
    parameters(teacher, weights.source, report=lambda note: None, advice=_ADVICE)
    normalise = settings.normalise or recipe.data.normalise
    check_model(named, weights, settings.model, f"{_KEY}.model's", normalise, f"{_KEY}.normalise")
    check_classes(weights, class_names, f"{_KEY}.from", "a teacher names the classes of ")
