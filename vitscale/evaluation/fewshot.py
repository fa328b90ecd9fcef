"""Few-shot evaluation during pre-training: a linear read-out of the frozen representation (paper section 4.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitscale.data.draws import mix
from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.evaluation.features import Features, extract_features
from vitscale.evaluation.ridge import best_shared_l2, fewshot_accuracy
from vitscale.ground.errors import DataError
from vitscale.ground.ranks import on_rank_zero

PAPER_L2S = tuple(2.0**exponent for exponent in range(-10, 20))
"""The regularisation strengths among which the authors' original few-shot code chose."""


@dataclass(frozen=True)
class FewShot(Evaluator):
    """Yields `<shots>shot`: test accuracy (a fraction), the mean over `seeds` draws of training samples.

    Args:
        name: the evaluator's name.
        make_train_loader, make_test_loader: start exact passes over the two splits, without augmentation.
        class_names: the dataset's classes, by label.
        shots: numbers of training samples per class.
        seeds: the seeds of the draws. Which samples are drawn depends on (seed, uid) alone, and fewer shots draw a
            subset of more.
        l2: regularisation strength; 2^10 is that of the authors' newer code.
        train_samples, test_samples: the numbers of samples of the two splits; another number is an error. None if
            damaged samples may be masked.
    """

    name: str
    make_train_loader: MakeLoader
    make_test_loader: MakeLoader
    class_names: Sequence[str]
    shots: Sequence[int] = (1, 5, 10, 25)
    seeds: Sequence[int] = (0, 1, 2)
    l2: float = 2.0**10
    train_samples: int | None = None
    test_samples: int | None = None

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`; if some classes have too few training samples, `<shots>shot_scarce` is their number.

        Raises `DataError` for labels outside the classes, a split without samples, and samples that are lost or counted
        twice.
        """
        drawn = self.draws(predict, [self.l2])
        for shots, table, scarce in zip(self.shots, drawn.accuracies, drawn.scarce, strict=True):
            yield f"{shots}shot", float(table.mean())
            if scarce:
                yield f"{shots}shot_scarce", scarce

    def draws(self, predict: Predict, l2s: Sequence[float]) -> "Draws":
        """The accuracy of every draw with every strength, on every rank. Raises as `run` does."""
        what = f"few-shot evaluator {self.name!r}"
        train = extract_features(self.make_train_loader, predict, self.train_samples, f"{what}, training")
        test = extract_features(self.make_test_loader, predict, self.test_samples, f"{what}, test")
        table, scarce = on_rank_zero(lambda: self._solve(train, test, l2s))
        return Draws(np.array(table).reshape(len(self.shots), len(self.seeds), len(l2s)), scarce)

    def _solve(self, train: Features | None, test: Features | None, l2s: Sequence[float]) -> tuple[list, list[int]]:
        if train is None or test is None:
            which = "test" if train is not None else "training"
            raise DataError(f"few-shot evaluator {self.name!r}: its {which} split has no samples")
        check_labels(self.name, train, "training", len(self.class_names))
        check_labels(self.name, test, "test", len(self.class_names))
        num_classes = len(self.class_names)
        counts = torch.bincount(train.labels, minlength=num_classes)
        table = np.empty((len(self.shots), len(self.seeds), len(l2s)))
        for row, shots in enumerate(self.shots):
            for column, seed in enumerate(self.seeds):
                drawn = select_shots(train.labels, train.uids, shots, num_classes, seed)
                few = train.features[drawn], train.labels[drawn]
                table[row, column] = fewshot_accuracy(*few, test.features, test.labels, num_classes, l2s)
        return table.tolist(), [int((counts < shots).sum()) for shots in self.shots]


@dataclass(frozen=True)
class Draws:
    """Few-shot accuracies.

    Attributes:
        accuracies: test accuracies (fractions), (shots, seeds, strengths).
        scarce: for each number of shots, the number of classes with fewer training samples, which all are used.
    """

    accuracies: np.ndarray
    scarce: Sequence[int]


@dataclass(frozen=True)
class SharedL2FewShot(Evaluator):
    """Few-shot evaluation as done at the paper's time: for each number of shots one strength, shared by all datasets.

    It chooses the strength in `l2s` with the best mean rank over `tasks`, by test accuracy as the original did; the
    tasks' own `l2` is not used. Yields `<task>/<shots>shot` and the choice as `l2_<shots>shot`.
    """

    name: str
    tasks: Sequence[FewShot]
    l2s: Sequence[float] = PAPER_L2S

    def __post_init__(self) -> None:
        assert len({tuple(task.shots) for task in self.tasks}) == 1, "tasks that share a strength have the same shots"

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Raises `DataError` as `FewShot` does."""
        drawn = [task.draws(predict, self.l2s).accuracies.mean(axis=1) for task in self.tasks]
        accuracies = torch.from_numpy(np.stack(drawn))  # (tasks, shots, strengths)
        for index, shots in enumerate(self.tasks[0].shots):
            best = best_shared_l2(accuracies[:, index])
            for task, accuracy in zip(self.tasks, accuracies[:, index, best].tolist(), strict=True):
                yield f"{task.name}/{shots}shot", accuracy
            yield f"l2_{shots}shot", self.l2s[best]


def check_labels(name: str, split: Features, which: str, num_classes: int) -> None:
    """Raise `DataError` if any sample of a split has a label outside the classes."""
    wrong = (split.labels < 0) | (split.labels >= num_classes)
    if wrong.any():
        raise DataError(
            f"few-shot evaluator {name!r}: {int(wrong.sum())} {which} samples have a label outside "
            f"0..{num_classes - 1} (-1 is unlabelled), the first with uid {int(split.uids[wrong][0])}"
        )


def select_shots(labels: Tensor, uids: Tensor, shots: int, num_classes: int, seed: int) -> Tensor:
    """Sorted rows of `shots` samples of every class: (N,), (N,) int64 -> at most (num_classes * shots,) int64.

    A class's samples are taken in the order of a hash of (seed, uid); a class with fewer gives all that it has.
    """
    counts = torch.bincount(labels, minlength=num_classes).numpy()
    order = np.lexsort((hash_of(seed, uids.numpy()), labels.numpy()))  # by label, then by hash
    starts = np.cumsum(counts) - counts
    drawn = np.arange(shots) < counts[:, None]
    return torch.from_numpy(np.sort(order[(starts[:, None] + np.arange(shots))[drawn]]))


def hash_of(seed: int, uids: np.ndarray) -> np.ndarray:
    """64-bit hashes of (seed, uid), (N,) uint64."""
    return mix(mix(np.array([seed], dtype=np.uint64)) ^ uids.astype(np.uint64))
