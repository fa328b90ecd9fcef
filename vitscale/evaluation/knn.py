"""Nearest neighbours during pre-training, as DINO measures (Caron et al. 2021); nothing is trained for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.fewshot import Task
from vitscale.evaluation.probes import neighbour_accuracies
from vitscale.ground.errors import DataError
from vitscale.ground.ranks import on_rank_zero


@dataclass(frozen=True)
class NearestNeighbours(Evaluator):
    """Yields `<k>nn`: test accuracy (a fraction) by the votes of the k nearest training samples (see `probes`).

    Args:
        make_train_loader, make_test_loader: start exact passes over the two splits, without augmentation.
        class_names: their classes, by label.
        numbers: the numbers k of neighbours.
        train_samples, test_samples: as `FewShot`'s.
    """

    name: str
    make_train_loader: MakeLoader
    make_test_loader: MakeLoader
    class_names: Sequence[str]
    numbers: Sequence[int] = (20,)
    train_samples: int | None = None
    test_samples: int | None = None

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`.

        Raises `DataError` for labels outside the classes, a split without samples, fewer training samples than
        neighbours, and samples that are lost or counted twice.
        """
        what = f"nearest-neighbour evaluator {self.name!r}"
        train = extract_features(self.make_train_loader, predict, self.train_samples, f"{what}, training")
        test = extract_features(self.make_test_loader, predict, self.test_samples, f"{what}, test")

        def measured() -> list[float]:
            task = Task.of(self.name, self.class_names, train, test, kind="nearest-neighbour")
            if (count := len(task.train.labels)) < max(self.numbers):
                raise DataError(f"{what}: {max(self.numbers)} neighbours of only {count} training samples")
            splits = task.train.features, task.train.labels, task.test.features, task.test.labels
            accuracies = neighbour_accuracies(*splits, len(self.class_names), self.numbers)
            return [accuracies[k] for k in self.numbers]

        for k, accuracy in zip(self.numbers, on_rank_zero(measured), strict=True):
            yield f"{k}nn", accuracy
