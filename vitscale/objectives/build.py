"""From a recipe to its objective."""

import importlib

from vitscale.objectives.objective import Objective
from vitscale.recipe import Recipe


def objective_class(recipe: Recipe) -> type[Objective]:
    """The module that computes a recipe's objective."""
    module, _, name = recipe.objective.implementation.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, Objective), found
    return found


def build_objective(recipe: Recipe, num_classes: int) -> Objective:
    """The recipe's objective around its model, values unset, on whatever device and dtype the context makes tensors."""
    return objective_class(recipe).of(recipe, num_classes)
