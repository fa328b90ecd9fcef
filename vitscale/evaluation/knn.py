"""Nearest neighbours during pre-training, as DINO measures (Caron et al. 2021); nothing is trained for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vitscale.evaluation.contract import Predict
from vitscale.evaluation.fewshot import OfSplits, Task
from vitscale.evaluation.probes import neighbour_accuracies
from vitscale.ground.errors import DataError


@dataclass(frozen=True)
class NearestNeighbours(OfSplits):
    """Yields `<k>nn`: test accuracy (a fraction) by the votes of the k nearest training samples (see `probes`).

    Args:
        numbers: the numbers k of neighbours.
    """

    kind: ClassVar[str] = "nearest-neighbour"

    numbers: Sequence[int] = (20,)

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`. Raises `DataError` as `measured`, and for fewer training samples than neighbours."""

        def measure(task: Task) -> list[float]:
            if (count := len(task.train.labels)) < max(self.numbers):
                raise DataError(f"{self.what}: {max(self.numbers)} neighbours of only {count} training samples")
            splits = task.train.features, task.train.labels, task.test.features, task.test.labels
            accuracies = neighbour_accuracies(*splits, len(self.class_names), self.numbers)
            return [accuracies[k] for k in self.numbers]

        for k, accuracy in zip(self.numbers, self.measured(predict, measure), strict=True):
            yield f"{k}nn", accuracy
