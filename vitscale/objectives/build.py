"""Builds the objective of a recipe."""

from vitscale.ground.errors import RecipeError
from vitscale.ground.extensions import implementation
from vitscale.models import Model
from vitscale.models.build import build_of_block
from vitscale.objectives.objective import Objective
from vitscale.recipe import Recipe


def objective_class(recipe: Recipe) -> type[Objective]:
    """The module that computes a recipe's objective. Raises `RecipeError` if its package is not installed."""
    return implementation(recipe.objective.implementation, Objective)


def build_objective(recipe: Recipe, num_classes: int) -> Objective:
    """The recipe's objective around its model, values unset, on whatever device and dtype the context makes tensors.

    Raises `RecipeError` if a parameter that the objective adds to the model has no initial value, or is not in the
    block's `own`.
    """
    objective = objective_class(recipe).of(recipe, num_classes)
    objective.scalars = {name: ramp.start for name, ramp in recipe.objective.courses.items()}
    of_model = {name for name, _ in objective.backbone.named_parameters()}
    added = [name for name, _ in objective.named_weights() if name not in of_model]
    for name in added:
        try:
            objective.initialiser(name)
        except KeyError:
            raise RecipeError(
                f"{recipe.objective.implementation}: `initialiser` knows no initial values for its parameter {name!r}"
            ) from None
    if unlisted := [name for name in added if not recipe.objective.owns(name)]:
        raise RecipeError(
            f"objective.kind {recipe.objective.kind}: its `own` must list the parameters that the objective adds to "
            f"the model; these are missing: {', '.join(unlisted)}"
        )
    return objective


def build_teacher(recipe: Recipe, num_classes: int) -> Model | None:
    """The model that a recipe's objective learns from, its values unset too; None without one."""
    teacher = recipe.objective.learns_from
    if teacher is None:
        return None
    return build_of_block(teacher.model, image_size=recipe.data.image_size, num_classes=num_classes).eval()
