"""Linear heads during pre-training: those of `heads`, on the representation that evaluators get."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from vitscale.evaluation.build import labelled_splits, on_splits
from vitscale.evaluation.contract import Loaders, Predict
from vitscale.evaluation.fewshot import OfSplits, Task, development
from vitscale.evaluation.heads import Layout, best_of_bank
from vitscale.recipe import Recipe
from vitscale.recipe.evaluation import LinearHeads as Block


@dataclass(frozen=True)
class LinearHeads(OfSplits):
    """Yields `top1`: test accuracy (a fraction) of the head that was best on a tenth of the training samples, trained
    again on all of them; and `lr`, its learning rate.

    Args:
        steps: as in `best_of_bank`.
    """

    kind: ClassVar[str] = "linear"

    steps: int | None = None

    @classmethod
    def of(cls, block: Block, recipe: Recipe, class_names: Sequence[str], loaders: Loaders) -> Self:
        splits = labelled_splits(recipe, block.train, block.test)
        return on_splits(cls, block.name, recipe, splits, block.crop, loaders, steps=block.steps)

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`. Raises `DataError` as `measured`, and for fewer than ten training samples."""

        def measure(task: Task) -> tuple[float, float]:
            x, y = task.train.features, task.train.labels
            chosen = best_of_bank(
                *(x, y, task.test.features, task.test.labels, len(self.class_names), development(y, task.train.uids)),
                Layout(1, x.shape[1], has_patches=False),
                steps=self.steps,
                device="cuda" if torch.cuda.is_available() else "cpu",
            )
            return chosen.accuracy, chosen.head.rate

        accuracy, rate = self.measured(predict, measure)
        yield "top1", accuracy
        yield "lr", rate
