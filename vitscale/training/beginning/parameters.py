"""The parameters of a recipe's model, layer by layer, without their values."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

import torch

from vitscale.objectives import build_objective, build_teacher
from vitscale.recipe import Recipe, is_frozen

_IN_A_BLOCK = re.compile(r"^backbone\.blocks\.(\d+)\.")


@dataclass(frozen=True)
class Layer:
    """A module that has parameters of its own.

    Attributes:
        block: the index of the encoder block that it belongs to; None outside the blocks.
        sizes: the number of elements of each parameter.
        trained: the number of elements of each parameter that is not frozen.
    """

    block: int | None
    sizes: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """All layers of a model, in the order of the forward pass.

    Attributes:
        kept: the number of elements of optimizer state, without the trained parameters' own values.
        kept_bytes: the size of that state in the optimizer's dtypes, in bytes; checkpoints store fp32.
        of_teacher: the number of a teacher's parameters, which every rank holds whole.
    """

    layers: tuple[Layer, ...]
    kept: int
    kept_bytes: int
    of_teacher: int = 0

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of every parameter."""
        return [size for layer in self.layers for size in layer.sizes]

    @cached_property
    def trained(self) -> list[int]:
        """The number of elements of every parameter that is not frozen."""
        return [size for layer in self.layers for size in layer.trained]

    @cached_property
    def total(self) -> int:
        """The number of elements of all parameters together."""
        return sum(self.sizes)


def model_parameters(recipe: Recipe, num_classes: int) -> Parameters:
    """The parameters of a recipe's model."""
    with torch.device("meta"):
        objective, teacher = build_objective(recipe, num_classes), build_teacher(recipe, num_classes)
    called = {parameter: name for name, parameter in objective.named_weights()}
    layers, kept, kept_bytes = [], 0, 0
    for called_name, parameter in objective.named_weights():
        if not is_frozen(recipe.optimizer, called_name):
            for kind, shape in recipe.kept(called_name, tuple(parameter.shape)).items():
                kept += math.prod(shape)
                kept_bytes += math.prod(shape) * (2 if kind in recipe.optimizer.kept_in_bf16 else 4)
    for name, module in objective.named_modules():
        own = list(module.parameters(recurse=False))
        found = _IN_A_BLOCK.match(name)
        if own:
            trained = tuple(p.numel() for p in own if not is_frozen(recipe.optimizer, called[p]))
            layers.append(Layer(int(found[1]) if found else None, tuple(p.numel() for p in own), trained))
    of_teacher = 0 if teacher is None else sum(parameter.numel() for parameter in teacher.parameters())
    return Parameters(tuple(layers), kept, kept_bytes, of_teacher)
