"""A model's work: the sum of its operations, from a recipe."""

from collections.abc import Callable
from dataclasses import dataclass

from vitscale.flops.accounting import FORWARD_PASSES_PER_TRAINING_STEP
from vitscale.ground.operations import Operation
from vitscale.recipe import Recipe
from vitscale.recipe.families import Model


@dataclass(frozen=True)
class Work:
    """What one image costs a model, or a part of it, and the parameters of that."""

    operations: tuple[Operation, ...]

    @property
    def macs(self) -> int:
        """MACs of the forward pass, taps on zero padding counted: comparable with torch's and timm's figures.

        What is not trained, a teacher, counts a third, because training counts three times these MACs.
        """
        return self._weighed(lambda operation: operation.macs)

    @property
    def accounting_macs(self) -> int:
        """MACs of the forward pass without the taps on zero padding: those behind exaFLOPs (see `accounting`)."""
        return self._weighed(lambda operation: operation.accounting_macs)

    def _weighed(self, macs: Callable[[Operation], int]) -> int:
        trained = sum(macs(operation) for operation in self.operations if operation.is_trained)
        others = sum(macs(operation) for operation in self.operations if not operation.is_trained)
        return trained + round(others / FORWARD_PASSES_PER_TRAINING_STEP)

    @property
    def backward_macs(self) -> int:
        """MACs of the backward pass, padding counted, nothing recomputed; a little less than twice the forward pass,
        because the images need no gradient."""
        return sum(operation.backward_macs for operation in self.operations)

    @property
    def params(self) -> int:
        return sum(operation.params for operation in self.operations)

    def recomputed(self, every: int) -> "Work":
        """What the backward pass computes again if the activations of every k-th block are not kept; nothing for 0.

        `every` is the recipe's `parallelism.activation_checkpointing`; blocks and the units of a stem are each counted
        from their first. What a fused attention recomputes by itself is not included.
        """
        if every == 0:
            return Work(())
        again = [one for one in self.operations if one.recomputed_in is not None and one.recomputed_in % every == 0]
        return Work(tuple(again))

    def parts(self) -> dict[str, "Work"]:
        """The breakdown by part, in the order in which an image meets the parts."""
        parts: dict[str, list[Operation]] = {}
        for operation in self.operations:
            parts.setdefault(operation.part, []).append(operation)
        return {part: Work(tuple(operations)) for part, operations in parts.items()}


def model_work(model: Model, image_size: int, num_classes: int | None) -> Work:
    """Work of the model that a recipe's `model` block describes, on one square image of `image_size` pixels a side."""
    return Work(tuple(model.operations(image_size, num_classes)))


def recipe_work(recipe: Recipe, num_classes: int) -> Work:
    """Work of a recipe's model and objective on one training image; `num_classes` is that of the training data."""
    outputs = num_classes if recipe.objective.has_classes else None
    of_model = recipe.objective.model_operations(recipe.context, outputs)
    return Work((*of_model, *recipe.objective.operations(recipe.context)))
