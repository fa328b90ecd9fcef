"""Linear and attentive heads during pre-training: those of `heads` and `attentive`, on what evaluators get."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from vitscale.evaluation.attentive import best_attentive, patches_of
from vitscale.evaluation.build import labelled_splits, on_splits
from vitscale.evaluation.contract import Loaders, Predict
from vitscale.evaluation.fewshot import OfSplits, Result, Task, check_enough, development
from vitscale.evaluation.heads import Layout, best_of_bank
from vitscale.models import Outputs, build_model
from vitscale.models.layers import CHANNELS
from vitscale.recipe import Recipe
from vitscale.recipe.evaluation import AttentiveHeads as AttentiveBlock
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

    def __post_init__(self) -> None:
        if self.train_samples is not None:
            check_enough(self.train_samples, f"{self.what}: ")

    @classmethod
    def of(cls, block: Block, recipe: Recipe, class_names: Sequence[str], loaders: Loaders) -> Self:
        """As `Evaluator.of`. Raises `DataError` for fewer than ten training samples."""
        splits = labelled_splits(recipe, block.train, block.test)
        return on_splits(cls, block.name, recipe, splits, block.crop, loaders, steps=block.steps)

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`. Raises `DataError` as `measured`, and for fewer than ten training samples."""
        rate, accuracy = self.measured(predict, self._best)
        yield "top1", accuracy
        yield "lr", rate

    def _best(self, task: Task) -> tuple[float, float]:
        layout = Layout(1, task.train.features.shape[1], has_patches=False)
        head, accuracy = best_of_bank(
            task.splits(), development(task.train.labels, task.train.uids), layout, steps=self.steps, device=_device()
        )
        return head.rate, accuracy


@dataclass(frozen=True)
class AttentiveHeads(LinearHeads):
    """As `LinearHeads`, of attentive heads on the patches' tokens.

    Args:
        extra_tokens: the number of tokens before those of patches.
        images: those of both splits.
        room: bytes that their tokens may take.
        host_bytes: bytes of rank 0's memory that they do take.
    """

    kind: ClassVar[str] = "attentive"

    extra_tokens: int = 0
    images: int = 0
    room: float = float("inf")
    host_bytes: int = 0

    @classmethod
    def of(cls, block: Block, recipe: Recipe, class_names: Sequence[str], loaders: Loaders) -> Self:
        """As `LinearHeads.of`. Raises `DataError`, too, if the tokens take more memory than the block allows."""
        assert isinstance(block, AttentiveBlock), block
        splits = labelled_splits(recipe, block.train, block.test)
        images, size = sum(split.num_samples for split in splits), recipe.data.image_size
        how = {"extra_tokens": recipe.model.extra_tokens, "images": images, "room": block.limit_gb * 1e9}
        made = on_splits(cls, block.name, recipe, splits, block.crop, loaders, steps=block.steps, **how)
        with torch.device("meta"), torch.no_grad():  # shapes alone, of any family
            outputs = build_model(recipe, None).eval()(torch.empty(1, size, size, CHANNELS))
        return replace(made, host_bytes=4 * images * made.patches(outputs).pooled.numel())

    def patches(self, outputs: Outputs) -> Outputs:
        """As `patches_of`, with what this evaluator knows."""
        return patches_of(outputs, self.extra_tokens, self.what, self.images, self.room)

    def measured(self, predict: Predict, measure: Callable[[Task], Result]) -> Result:
        """As `OfSplits.measured`, with patches' tokens as features."""
        return super().measured(lambda images: self.patches(predict(images)), measure)

    def _best(self, task: Task) -> tuple[float, float]:
        return best_attentive(
            task.splits(), development(task.train.labels, task.train.uids), steps=self.steps, device=_device()
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
