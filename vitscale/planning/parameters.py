"""The parameters of a recipe's model, layer by layer, without their values."""

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from vitscale.objectives import build_objective
from vitscale.recipe import Recipe

_IN_A_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


@dataclass(frozen=True)
class Layer:
    """A module that has parameters of its own.

    Attributes:
        block: the index of the encoder block that it belongs to; None for the others.
        sizes: elements of each parameter.
    """

    block: int | None
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """All layers of a model, in the order in which an image meets them."""

    layers: tuple[Layer, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [size for layer in self.layers for size in layer.sizes]

    @cached_property
    def total(self) -> int:
        """Elements of all parameters together."""
        return sum(self.sizes)


def model_parameters(recipe: Recipe, num_classes: int) -> Parameters:
    """The parameters of the model that a recipe trains."""
    with torch.device("meta"):
        model = build_objective(recipe, num_classes)
    layers = []
    for name, module in model.named_modules():
        sizes = tuple(parameter.numel() for parameter in module.parameters(recurse=False))
        found = _IN_A_BLOCK.match(name)
        if sizes:
            layers.append(Layer(int(found[1]) if found else None, sizes))
    return Parameters(tuple(layers))
