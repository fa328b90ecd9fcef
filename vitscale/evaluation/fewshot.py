"""Evaluations of the frozen representation during pre-training: few-shot (paper section 4.1), nearest neighbours."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitscale.data.draws import mix
from vitscale.evaluation.contract import Evaluator, MakeLoader, Predict
from vitscale.evaluation.features import Features, extract_features
from vitscale.evaluation.probes import DEVELOPMENT, Splits, neighbour_accuracies
from vitscale.evaluation.ridge import best_shared_l2, fewshot_accuracy
from vitscale.ground.errors import DataError
from vitscale.ground.ranks import on_rank_zero

PAPER_L2S = tuple(2.0**exponent for exponent in range(-10, 20))
"""The regularisation strengths among which the authors' original few-shot code chose."""
_ALL = slice(None)  # rows, without a copy
_EVERY = round(1 / DEVELOPMENT)

Result = TypeVar("Result")


@dataclass(frozen=True)
class OfSplits(Evaluator):
    """The base of evaluators that learn from the features of one split and are tested on those of another.

    Args:
        make_train_loader, make_test_loader: start exact passes over the two splits, without augmentation.
        class_names: their classes, by label.
        train_samples, test_samples: the numbers of samples of the two splits; another number is an error. None if
            damaged samples may be masked.
    """

    kind: ClassVar[str]

    name: str
    make_train_loader: MakeLoader
    make_test_loader: MakeLoader
    class_names: Sequence[str]
    train_samples: int | None = field(default=None, kw_only=True)
    test_samples: int | None = field(default=None, kw_only=True)

    @property
    def what(self) -> str:
        """What messages call it."""
        return f"{self.kind} evaluator {self.name!r}"

    def measured(self, predict: Predict, measure: Callable[["Task"], Result]) -> Result:
        """Plain data that rank 0 computes from the features of both splits, on every rank.

        Raises `DataError` for labels outside the classes, a split without samples, and samples that are lost or counted
        twice.
        """
        train = extract_features(self.make_train_loader, predict, self.train_samples, f"{self.what}, training")
        test = extract_features(self.make_test_loader, predict, self.test_samples, f"{self.what}, test")
        return on_rank_zero(lambda: measure(Task.of(self.name, self.class_names, train, test, kind=self.kind)))


@dataclass
class Again:
    """How few-shot evaluation passes over the samples that it draws alone, once a whole pass has shown which these are.

    Args:
        make_loader: as `make_train_loader`, for some rows, int64 (N,), sorted.

    Attributes:
        rows: the training samples of all draws; None before the whole pass.
    """

    make_loader: Callable[[np.ndarray], MakeLoader]
    rows: list[int] | None = None


@dataclass(frozen=True)
class FewShot(OfSplits):
    """Yields `<shots>shot`: test accuracy (a fraction), the mean over `seeds` draws of training samples.

    Args:
        shots: numbers of training samples per class.
        seeds: the seeds of the draws. Which samples are drawn depends on (seed, uid) alone, and fewer shots draw a
            subset of more.
        l2: regularisation strength; 2^10 is that of the authors' newer code.
        again: how to pass over what is drawn alone. None passes over the whole training split each time.
    """

    kind: ClassVar[str] = "few-shot"

    shots: Sequence[int] = (1, 5, 10, 25)
    seeds: Sequence[int] = (0, 1, 2)
    l2: float = 2.0**10
    again: Again | None = None

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`; if some classes have too few training samples, `<shots>shot_scarce` is their number.

        Raises as `measured`.
        """
        accuracies, scarce = self.draws(predict, [self.l2])
        for shots, table, count in zip(self.shots, accuracies, scarce, strict=True):
            yield f"{shots}shot", float(table.mean())
            if count:
                yield f"{shots}shot_scarce", count

    def draws(self, predict: Predict, l2s: Sequence[float]) -> tuple[np.ndarray, list[int]]:
        """Accuracies (shots, seeds, strengths), and how many classes have fewer; on every rank. Raises as `run`."""

        def measure(task: Task) -> tuple[list, list[int]]:
            def solve(few: Splits, uids: Tensor) -> Solved:
                return fewshot_accuracy(few, l2s), []

            tables = [task.draws(shots, self.seeds, solve)[0].tolist() for shots in self.shots]
            return tables, [task.scarce_classes(shots) for shots in self.shots]

        few = self
        if self.again is not None:
            # The whole pass only says which: a sample's last bits may depend on its place in a batch, and a run that
            # goes on, or is verified, has to find what one that was not interrupted finds.
            rows = self.again.rows = self._drawn(predict) if self.again.rows is None else self.again.rows
            few = replace(self, make_train_loader=self.again.make_loader(np.array(rows)), train_samples=len(rows))
        tables, scarce = few.measured(predict, measure)
        return np.array(tables).reshape(len(self.shots), len(self.seeds), len(l2s)), scarce

    def _drawn(self, predict: Predict) -> list[int]:
        """The places in a whole pass, sorted, of the training samples of all draws; on every rank. Raises as `run`."""
        train = extract_features(self.make_train_loader, predict, self.train_samples, f"{self.what}, training")
        shots, num_classes = max(self.shots), len(self.class_names)

        def draw() -> list[int]:
            split = checked(self.what, "training", train, num_classes)
            assert split.places is not None, "from a pass"
            rows = [select_shots(split.labels, split.uids, shots, num_classes, seed) for seed in self.seeds]
            return split.places[torch.cat(rows).unique()].sort().values.tolist()

        return on_rank_zero(draw)


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
        drawn = [task.draws(predict, self.l2s)[0].mean(axis=1) for task in self.tasks]
        accuracies = torch.from_numpy(np.stack(drawn))  # (tasks, shots, strengths)
        for index, shots in enumerate(self.tasks[0].shots):
            best = best_shared_l2(accuracies[:, index])
            for task, accuracy in zip(self.tasks, accuracies[:, index, best].tolist(), strict=True):
                yield f"{task.name}/{shots}shot", accuracy
            yield f"l2_{shots}shot", self.l2s[best]


@dataclass(frozen=True)
class NearestNeighbours(OfSplits):
    """Yields `<k>nn`: test accuracy (a fraction) by the votes of the k nearest training samples, as DINO measures
    (Caron et al. 2021; see `probes`).

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
            accuracies = neighbour_accuracies(task.splits(), self.numbers)
            return [accuracies[k] for k in self.numbers]

        for k, accuracy in zip(self.numbers, self.measured(predict, measure), strict=True):
            yield f"{k}nn", accuracy


Solved = tuple[list[float], list[dict[str, Any]]]  # test accuracies (fractions), and what to report about each


@dataclass(frozen=True)
class Task:
    """The features of two splits of the same classes."""

    name: str
    class_names: Sequence[str]
    train: Features
    test: Features

    @classmethod
    def of(
        cls,
        name: str,
        class_names: Sequence[str],
        train: Features | None,
        test: Features | None,
        *,
        kind: str = "few-shot",
    ) -> Self:
        """Raises `DataError`, which names the `kind` of evaluator, as `checked` does."""
        what, num_classes = f"{kind} evaluator {name!r}", len(class_names)
        train, test = checked(what, "training", train, num_classes), checked(what, "test", test, num_classes)
        return cls(name, class_names, train, test)

    def splits(self, rows: Tensor | slice = _ALL) -> Splits:
        """For a classifier that learns from these rows of the training samples."""
        train, test = self.train, self.test
        return Splits(train.features[rows], train.labels[rows], test.features, test.labels, len(self.class_names))

    def draws(
        self, shots: int | None, seeds: Sequence[int], solve: Callable[[Splits, Tensor], Solved]
    ) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Accuracies (draws, columns) with so many samples per class, or all, and what to report about each column.

        `solve` is also given the uids of the training samples.
        """
        train, num_classes, solved = self.train, len(self.class_names), []
        for seed in [0] if shots is None else seeds:
            rows = _ALL if shots is None else select_shots(train.labels, train.uids, shots, num_classes, seed)
            solved.append(solve(self.splits(rows), train.uids[rows]))
        columns = []
        for column in zip(*(about for _, about in solved), strict=True):
            every = {key: [draw[key] for draw in column] for key in column[0]}  # draws may have chosen differently
            columns.append({key: values[0] if len(set(values)) == 1 else values for key, values in every.items()})
        return np.array([accuracies for accuracies, _ in solved]), columns

    def scarce_classes(self, shots: int) -> int:
        """The number of classes with fewer training samples, which all are used."""
        return int((torch.bincount(self.train.labels, minlength=len(self.class_names)) < shots).sum())


def checked(what: str, which: str, split: Features | None, num_classes: int) -> Features:
    """A training or test split (`which`) to learn from or be tested on.

    Raises `DataError`, whose message begins with `what`, for a split without samples, for labels outside the classes,
    and for representations that are not finite.
    """
    if split is None:
        raise DataError(f"{what}: its {which} split has no samples")
    last = num_classes - 1
    wrong = (split.labels < 0) | (split.labels > last)
    if wrong.any():
        raise DataError(
            f"{what}: {int(wrong.sum())} {which} samples have a label outside 0..{last} (-1 is unlabelled), "
            f"the first with uid {int(split.uids[wrong][0])}"
        )
    wrong = torch.cat([~rows.isfinite().flatten(1).all(dim=1) for rows in split.features.split(1024)])
    if wrong.any():
        raise DataError(
            f"{what}: the representation of {int(wrong.sum())} {which} samples is not finite, the first with "
            f"uid {int(split.uids[wrong][0])}"
        )
    return split


def select_shots(labels: Tensor, uids: Tensor, shots: int, num_classes: int, seed: int) -> Tensor:
    """Sorted rows of `shots` samples of every class: (N,), (N,) int64 -> at most (num_classes * shots,) int64.

    A class's samples are taken in the order of a hash of (seed, uid); a class with fewer gives all that it has.
    """
    counts = torch.bincount(labels, minlength=num_classes).numpy()
    order = np.lexsort((hash_of(seed, uids.numpy()), labels.numpy()))  # by label, then by hash
    starts = np.cumsum(counts) - counts
    drawn = np.arange(shots) < counts[:, None]
    return torch.from_numpy(np.sort(order[(starts[:, None] + np.arange(shots))[drawn]]))


def development(labels: Tensor, uids: Tensor) -> Tensor:
    """A mask (N,) bool: every tenth training sample, to choose settings on. Raises `DataError` for fewer than ten."""
    check_enough(len(uids))
    chosen = torch.zeros(len(uids), dtype=torch.bool)
    # Every tenth sample of the classes, each in the order of a hash, so that no class is missing from what is fitted.
    order = torch.from_numpy(np.lexsort((hash_of(0, uids.numpy()), labels.numpy())))
    chosen[order[_EVERY - 1 :: _EVERY]] = True
    return chosen


def check_enough(samples: int, what: str = "") -> None:
    """Raise `DataError`, whose message begins with `what`, for so few training samples that `development` has none."""
    if samples < _EVERY:
        raise DataError(f"{what}{samples} training samples: this needs {_EVERY}, to choose its settings on a tenth")


def hash_of(seed: int, uids: np.ndarray) -> np.ndarray:
    """64-bit hashes of (seed, uid), (N,) uint64."""
    return mix(mix(np.array([seed], dtype=np.uint64)) ^ uids.astype(np.uint64))
