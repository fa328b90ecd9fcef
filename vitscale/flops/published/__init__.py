"""What the paper reports, table by table, and its training sets, as data: reports, plots and comparisons read it here.

Files are named after the tables of "An Image is Worth 16x16 Words" and hold what is printed: top-1 accuracies in
percent, except in table 8, which prints fractions. An empty cell is one that the paper leaves out. Names of models and
data sets are those of recipes. Beside what is printed:

* Table 6 has two columns of exaFLOPs: those of the corrected table ("Fixed an error in exaFLOPs computation in Figure 5
  and Table 6"), which are the target, and `exaflops_first_posted`, which it replaced: for the most part those of images
  of 384 pixels, where training is at 224.
* Table 2 prints 88.4 and 88.5 for Noisy Student; the second is another paper's, and left out. It does not say for how
  many epochs a model was trained.
"""

import csv
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Top-1 after fine-tuning, in percent, on the data sets of Tables 2, 5, 6 and 7."""

    imagenet: float
    imagenet_real: float | None = None
    cifar10: float
    cifar100: float
    pets: float
    flowers: float

    @property
    def average_5(self) -> float:
        """The mean of Figure 5 and Table 7: ImageNet, CIFAR-10, CIFAR-100, Pets, Flowers."""
        return (self.imagenet + self.cifar10 + self.cifar100 + self.pets + self.flowers) / 5


@dataclass(frozen=True, kw_only=True)
class StateOfTheArt:
    """A column of Table 2: means and standard deviations of three fine-tuning runs, and the cost of pre-training."""

    name: str
    model: str
    pretraining: str
    imagenet: float
    imagenet_std: float | None
    imagenet_real: float
    imagenet_real_std: float | None
    cifar10: float | None
    cifar10_std: float | None
    cifar100: float | None
    cifar100_std: float | None
    pets: float | None
    pets_std: float | None
    flowers: float | None
    flowers_std: float | None
    vtab: float | None
    vtab_std: float | None
    tpuv3_core_days: float


@dataclass(frozen=True, kw_only=True)
class DataSize(Transfer):
    """Table 5: one model, pre-trained on one data set; fine-tuned at 384 pixels."""

    pretraining: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Scaling(Transfer):
    """Table 6: one run of the scaling study on JFT-300M."""

    model: str
    epochs: int
    exaflops: float
    exaflops_first_posted: float


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice(Transfer):
    """Table 7: one ResNet, pre-trained on JFT-300M for 7 epochs by one optimizer."""

    model: str
    optimizer: str
    average: float


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding:
    """Table 8: ViT-B/16 with one kind of position embedding; 5-shot accuracy on ImageNet, a fraction."""

    position: str
    at: str
    imagenet_5shot: float


class PaperSet(NamedTuple):
    """A training set of the paper: samples and classes."""

    samples: int
    num_classes: int


PAPER_SETS = {
    "jft300m/train": PaperSet(303_000_000, 18_291),
    "jft300m/train-90m": PaperSet(90_000_000, 18_291),
    "jft300m/train-30m": PaperSet(30_000_000, 18_291),
    "jft300m/train-9m": PaperSet(9_000_000, 18_291),
    "imagenet21k/train": PaperSet(14_197_122 - 102_400, 21_843),  # the authors validate on the rest
    "imagenet/train": PaperSet(1_281_167, 1_000),
}

_Row = TypeVar("_Row")


def _read(table: int, row: type[_Row]) -> tuple[_Row, ...]:
    return tuple(row(**content) for content in _content(table))


def _content(table: int) -> list[dict[str, Any]]:
    with (_FOLDER / f"table{table}.csv").open(encoding="utf-8", newline="") as file:
        return [{key: _value(text) for key, text in line.items()} for line in csv.DictReader(file)]


def _value(text: str) -> str | int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


table_2 = cache(partial(_read, 2, StateOfTheArt))  # comparison with the state of the art, and TPUv3-core-days
table_5 = cache(partial(_read, 5, DataSize))  # pre-training on ImageNet, ImageNet-21k and JFT-300M (Figure 3)
table_6 = cache(partial(_read, 6, Scaling))  # the scaling study (Figure 5)
table_7 = cache(partial(_read, 7, OptimizerChoice))  # ResNets pre-trained with Adam and with SGD
table_8 = cache(partial(_read, 8, PositionEmbedding))
"""Position embeddings; `position` and `at` are the words of a recipe's `model.position`."""


@cache
def table_9() -> dict[tuple[str, str], dict[str, float]]:
    """VTAB-1k: (model, pre-training) -> accuracy in percent by task, in the table's order, and their `mean`."""
    return {(row.pop("model"), row.pop("pretraining")): row for row in _content(9)}
