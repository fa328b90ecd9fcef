"""The contract between evaluators and their runner: the trainer, or a stand-alone command.

The runner supplies `predict`; the evaluator brings its data and yields numbers.

Every rank runs every evaluator and calls `predict` equally often: with ZeRO-3 a forward pass gathers parameters from
all ranks, and one call more or less on any rank is a hang. Hence an evaluator never stops early because of what it sees
in its own batches; it raises on all ranks, after they have exchanged what they found. All ranks yield the same numbers,
so that decisions based on them (keep the best, stop early) are the same everywhere.

Shape legend: B batch, H W C image height, width, channels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.data.shards import Manifest
from vitscale.models import Outputs
from vitscale.recipe import EvalCrop, Recipe

Predict = Callable[[Tensor], Outputs]
"""Images, uint8 (B, H, W, C) on the host -> outputs. Moves and normalises them, and runs the model in evaluation mode,
without gradients."""

MakeLoader = Callable[[], Iterable[Batch]]
"""Starts one exact pass over a split: all ranks together see every sample once, in equally many batches each. Rows with
a False `mask` do not count: fillers, which make the ranks' parts equal, and masked samples."""

Loaders = Callable[[Manifest, EvalCrop], MakeLoader]
"""A manifest and a crop -> what starts passes over this rank's part of the manifest's selected samples."""


class Evaluator:
    """Measures a model.

    Attributes:
        name: unique within a run; metrics are reported as `<name>/<metric>`.
    """

    name: str

    @classmethod
    def of(cls, block: Any, recipe: Recipe, class_names: Sequence[str], loaders: Loaders) -> Self:
        """The evaluator that a block of `evaluation.evaluators` describes, for one rank.

        Args:
            block: the recipe's block, whose class names this evaluator as its `implementation`.
            recipe: the run's; its `dataset_path` finds datasets.
            class_names: the names of the model's outputs.
            loaders: makes loaders over this rank's part of a dataset.

        Raises `DataError` for data that do not fit the model.
        """
        raise NotImplementedError

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Yield (metric name, value), the same on all ranks. Every rank must call `predict` equally often.

        Raises `DataError` on all ranks for data that cannot be evaluated.
        """
        raise NotImplementedError


def evaluate(evaluators: Sequence[Evaluator], predict: Predict) -> dict[str, float]:
    """Run the evaluators in order and return `{"<evaluator>/<metric>": value}`."""
    names = [evaluator.name for evaluator in evaluators]
    assert len(set(names)) == len(names), f"evaluators share a name: {names}"
    return {f"{evaluator.name}/{metric}": value for evaluator in evaluators for metric, value in evaluator.run(predict)}
