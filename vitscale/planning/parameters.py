"""The parameters of a recipe's model, layer by layer, without their values."""

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, is_frozen

_IN_A_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


@dataclass(frozen=True)
class Layer:
    """A module that has parameters of its own.

    Attributes:
        block: the index of the encoder block that it belongs to; None for the others.
        sizes: elements of each parameter.
        trained: the same of those that are not frozen.
    """

    block: int | None
    sizes: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """All layers of a model, in the order in which an image meets them."""

    layers: tuple[Layer, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [size for layer in self.layers for size in layer.sizes]

    @cached_property
    def trained(self) -> list[int]:
        """Elements of every parameter that is not frozen."""
        return [size for layer in self.layers for size in layer.trained]

    @cached_property
    def total(self) -> int:
        """Elements of all parameters together."""
        return sum(self.sizes)


def model_parameters(recipe: Recipe, num_classes: int) -> Parameters:
    """The parameters of a recipe's model."""
    with torch.device("meta"):
        objective = build_objective(recipe, num_classes)
    called = {parameter: name for name, parameter in objective.named_weights()}
    layers = []
    for name, module in objective.named_modules():
        own = list(module.parameters(recurse=False))
        found = _IN_A_BLOCK.match(name)
        if own:
            trained = tuple(p.numel() for p in own if not is_frozen(recipe.optimizer, called[p]))
            layers.append(Layer(int(found[1]) if found else None, tuple(p.numel() for p in own), trained))
    return Parameters(tuple(layers))
