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
from vitscale.training.beginning.found_weights import (
    Named,
    check_classes,
    check_model,
    check_normalisation,
    find_weights,
    open_found,
)
from vitscale.training.deepspeed import distributed

_KEY = "objective.teacher"
_ADVICE = "the head of the teacher is needed, with the classes of data.train"


def check_teacher(recipe: Recipe, class_names: list[str]) -> None:
    """Check the teacher by names and shapes alone, before the ranks meet.

    Args:
        class_names: the classes of the training data.

    Raises `RecipeError` if there are no such weights or they contradict the recipe, and `CheckpointError` if they are
    damaged or of another model.
    """
    settings = recipe.objective
    if isinstance(settings, recipes.Distillation) and settings.teacher.model.num_classes not in (
        None,
        len(class_names),
    ):
        raise RecipeError(
            f"{_KEY}.model.num_classes is {settings.teacher.model.num_classes}, but data.train has {len(class_names)} "
            "classes, and the teacher's are the same; leave it out"
        )
    if (named := _named(recipe)) is not None:
        with torch.device("meta"):
            teacher = build_teacher(recipe, len(class_names))
        assert teacher is not None
        _check(recipe, class_names, named, find_weights(named), teacher)


def load_teacher(
    recipe: Recipe, class_names: list[str], world: distributed.World, say: Callable[[str], None]
) -> tuple[Model | None, dict[str, Any] | None]:
    """The teacher on this rank's device, in the dtype of the run; all ranks call it together.

    Args:
        class_names: the classes of the training data.
        say: prints what is taken from where, on rank 0.

    Returns:
        The teacher, or None without one; and what identifies its weights, None without a source.

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
        found = open_found(named, world, say)
        try:
            _check(recipe, class_names, named, found, teacher)
            load_weights(teacher, found.source, report=lambda note: None)
        except VitscaleError as error:
            raise error.on_all_ranks() from None
        for note in found.source.notes:
            say(f"{found.source.path}: {note}")
        say(f"teacher: {found.title}")
        identity = found.identity
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


def _check(recipe: Recipe, class_names: list[str], named: Named, found: OpenWeights, teacher: Model) -> None:
    settings = recipe.objective
    assert isinstance(settings, recipes.Distillation)
    parameters(teacher, found.source, report=lambda note: None, advice=_ADVICE)
    check_model(named, found, settings.teacher.model, f"{_KEY}.model's")
    normalise = settings.teacher.normalise or recipe.data.normalise
    check_normalisation(named, found, normalise, f"{_KEY}.normalise")
    check_classes(found, class_names, f"{_KEY}.from", "a teacher names the classes of ")
