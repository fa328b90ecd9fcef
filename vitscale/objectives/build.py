"""From a recipe to its objective."""

from vitscale.extensions import implementation
from vitscale.objectives.objective import Objective
from vitscale.recipe import Recipe


def objective_class(recipe: Recipe) -> type[Objective]:
    """The module that computes a recipe's objective. Raises `RecipeError` where another package's is not there."""
    return implementation(recipe.objective.implementation, Objective)


def build_objective(recipe: Recipe, num_classes: int) -> Objective:
    """The recipe's objective around its model, values unset, on whatever device and dtype the context makes tensors."""
    return objective_class(recipe).of(recipe, num_classes)
