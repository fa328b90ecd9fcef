"""Builds the objective of a recipe."""

from vitscale import recipe as recipes
from vitscale.extensions import implementation
from vitscale.models import Model
from vitscale.models.build import build_of_block
from vitscale.objectives.objective import Objective
from vitscale.recipe import Recipe


def objective_class(recipe: Recipe) -> type[Objective]:
    """The module that computes a recipe's objective. Raises `RecipeError` if its package is not installed."""
    return implementation(recipe.objective.implementation, Objective)


def build_objective(recipe: Recipe, num_classes: int) -> Objective:
    """The recipe's objective around its model, values unset, on whatever device and dtype the context makes tensors."""
    return objective_class(recipe).of(recipe, num_classes)


def build_teacher(recipe: Recipe, num_classes: int) -> Model | None:
    """The model that a recipe's objective learns from, its values unset too; None without one."""
    settings = recipe.objective
    if not isinstance(settings, recipes.Distillation):
        return None
    return build_of_block(settings.teacher.model, image_size=recipe.data.image_size, num_classes=num_classes).eval()
