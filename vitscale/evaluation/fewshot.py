"""Few-shot evaluation during pre-training: a linear read-out of the frozen representation (paper section 4.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitscale.data.hashing import mix
from vitscale.errors import DataError
from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.evaluation.ridge import best_shared_l2, fewshot_accuracy
from vitscale.ranks import gather_rows, on_rank_zero

PAPER_L2S = tuple(2.0**exponent for exponent in range(-10, 20))
"""The regularisation strengths that the authors' original few-shot code chose among."""


@dataclass(frozen=True)
class FewShot(Evaluator):
    """Yields `<shots>shot`: test accuracy (a fraction), the mean over `seeds` draws of training samples.

    Args:
        make_train_loader, make_test_loader: exact passes over the two splits, without augmentation.
        class_names: of the data set, by class index.
        shots: training samples a class.
        seeds: of the draws. Which samples are drawn depends on (seed, uid) alone, and fewer shots draw a subset of
            more.
        l2: regularisation strength; 2^10 is that of the authors' newer code.
    """

    name: str
    make_train_loader: MakeLoader
    make_test_loader: MakeLoader
    class_names: Sequence[str]
    shots: Sequence[int] = (1, 5, 10, 25)
    seeds: Sequence[int] = (0, 1, 2)
    l2: float = 2.0**10

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Raises `DataError` for a class with too few training samples and for labels outside the classes."""
        for shots, (accuracy,) in zip(self.shots, self.accuracies(predict, [self.l2]), strict=True):
            yield f"{shots}shot", accuracy

    def accuracies(self, predict: Predict, l2s: Sequence[float]) -> list[list[float]]:
        """Mean accuracy over the seeds for each of `shots` (rows) and of `l2s` (columns), on every rank."""
        train = extract_features(self.make_train_loader, predict)
        test = extract_features(self.make_test_loader, predict)
        return on_rank_zero(lambda: self._solve(train, test, l2s))

    def _solve(self, train: "Features | None", test: "Features | None", l2s: Sequence[float]) -> list[list[float]]:
        if train is None or test is None:
            which = "test" if train is not None else "training"
            raise DataError(f"few-shot evaluator {self.name!r}: its {which} split has no samples")
        self._check_labels(train, "training")
        self._check_labels(test, "test")
        num_classes = len(self.class_names)
        table = []
        for shots in self.shots:
            self._check_counts(train.labels, shots)
            draws = [select_shots(train.labels, train.uids, shots, num_classes, seed) for seed in self.seeds]
            by_seed = [
                fewshot_accuracy(train.features[rows], train.labels[rows], test.features, test.labels, num_classes, l2s)
                for rows in draws
            ]
            table.append(np.mean(by_seed, axis=0).tolist())
        return table

    def _check_labels(self, split: "Features", which: str) -> None:
        wrong = (split.labels < 0) | (split.labels >= len(self.class_names))
        if wrong.any():
            raise DataError(
                f"few-shot evaluator {self.name!r}: {int(wrong.sum())} {which} samples have a label outside "
                f"0..{len(self.class_names) - 1} (-1 is unlabelled), the first with uid {int(split.uids[wrong][0])}"
            )

    def _check_counts(self, labels: Tensor, shots: int) -> None:
        counts = torch.bincount(labels, minlength=len(self.class_names)).tolist()
        scarce = [f"{name} ({n})" for name, n in zip(self.class_names, counts, strict=True) if n < shots]
        if scarce:
            more = f" and {len(scarce) - 5} more" if len(scarce) > 5 else ""
            raise DataError(
                f"few-shot evaluator {self.name!r}: {shots} shots need {shots} training samples of every class, but "
                f"there are fewer of {', '.join(scarce[:5])}{more}. Ask for fewer shots or add samples"
            )


@dataclass(frozen=True)
class SharedL2FewShot(Evaluator):
    """Few-shot evaluation as the paper's time did it: one strength a shot count, shared by all data sets.

    Of `l2s` it takes the one with the best mean rank over `tasks`, on test accuracies as the original did; the `l2` of
    a task is not used. Yields `<task>/<shots>shot` and the choice as `l2_<shots>shot`.
    """

    name: str
    tasks: Sequence[FewShot]
    l2s: Sequence[float] = PAPER_L2S

    def __post_init__(self) -> None:
        assert len({tuple(task.shots) for task in self.tasks}) == 1, "tasks that share a strength have the same shots"

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Raises `DataError` as `FewShot` does."""
        accuracies = torch.tensor([task.accuracies(predict, self.l2s) for task in self.tasks], dtype=torch.float64)
        for index, shots in enumerate(self.tasks[0].shots):
            best = best_shared_l2(accuracies[:, index])
            for task, accuracy in zip(self.tasks, accuracies[:, index, best].tolist(), strict=True):
                yield f"{task.name}/{shots}shot", accuracy
            yield f"l2_{shots}shot", self.l2s[best]


@dataclass(frozen=True)
class Features:
    """Representations of a whole split, sorted by uid so that they do not depend on how ranks shared the work.

    `features` (N, D) fp32, `labels` (N,) int64, `uids` (N,) int64, all in host memory.
    """

    features: Tensor
    labels: Tensor
    uids: Tensor


@torch.no_grad()
def extract_features(make_loader: MakeLoader, predict: Predict) -> Features | None:
    """Representations of every sample that the loader passes over, on rank 0; None elsewhere, or if there are none.

    Batches are gathered one by one, so that the split has to fit into the host memory of rank 0 only.
    """
    parts = []
    for batch in make_loader():
        features = predict(batch.images).pooled.float()
        mask = batch.mask.to(features.device)
        labels, uids = batch.labels.to(features.device), batch.uids.to(features.device)
        rows = gather_rows(features[mask], labels[mask], uids[mask])
        if rows is not None:
            parts.append(rows)
    if not parts:
        return None
    features, labels, uids = (torch.cat(column) for column in zip(*parts, strict=True))
    order = uids.argsort()
    return Features(features[order], labels[order], uids[order])


def select_shots(labels: Tensor, uids: Tensor, shots: int, num_classes: int, seed: int) -> Tensor:
    """Rows of `shots` samples of every class, sorted: (N,), (N,) int64 -> (num_classes * shots,) int64.

    Samples of a class are taken in the order of a hash of (seed, uid). Every class has at least `shots`.
    """
    counts = torch.bincount(labels, minlength=num_classes).numpy()
    order = np.lexsort((_hash(seed, uids.numpy()), labels.numpy()))  # by label, then by hash
    starts = np.cumsum(counts) - counts
    return torch.from_numpy(np.sort(order[(starts[:, None] + np.arange(shots)).ravel()]))


def _hash(seed: int, uids: np.ndarray) -> np.ndarray:
    """64-bit hashes of (seed, uid), (N,) uint64."""
    return mix(mix(np.array([seed], dtype=np.uint64)) ^ uids.astype(np.uint64))
