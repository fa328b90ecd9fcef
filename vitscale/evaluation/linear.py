"""Linear heads during pre-training: those of `heads`, on the representation that evaluators get."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from vitscale.evaluation.build import labelled_splits, samples_expected
from vitscale.evaluation.contract import Evaluator, Loaders, MakeLoader, Predict
from vitscale.evaluation.features import extract_features
from vitscale.evaluation.fewshot import Task, development
from vitscale.evaluation.heads import Layout, best_of_bank
from vitscale.ground.ranks import on_rank_zero
from vitscale.recipe import Recipe
from vitscale.recipe.evaluation import LinearHeads as Block


@dataclass(frozen=True)
class LinearHeads(Evaluator):
    """Yields `top1`: test accuracy (a fraction) of the head that was best on a tenth of the training samples, trained
    again on all of them; and `lr`, its learning rate.

    Args:
        make_train_loader, make_test_loader: start exact passes over the two splits, without augmentation.
        class_names: their classes, by label.
        steps: as in `best_of_bank`.
        train_samples, test_samples: as `FewShot`'s.
    """

    name: str
    make_train_loader: MakeLoader
    make_test_loader: MakeLoader
    class_names: Sequence[str]
    steps: int | None = None
    train_samples: int | None = None
    test_samples: int | None = None

    @classmethod
    def of(cls, block: Block, recipe: Recipe, class_names: Sequence[str], loaders: Loaders) -> Self:
        """As `Evaluator.of`."""
        train, test = labelled_splits(recipe, block.train, block.test)
        both = loaders(train, block.crop), loaders(test, block.crop)
        expected = samples_expected(recipe, train), samples_expected(recipe, test)
        return cls(block.name, *both, train.class_names, block.steps, *expected)

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """As `Evaluator.run`.

        Raises `DataError` for labels outside the classes, a split without samples, fewer than ten training samples, and
        samples that are lost or counted twice.
        """
        what = f"linear evaluator {self.name!r}"
        train = extract_features(self.make_train_loader, predict, self.train_samples, f"{what}, training")
        test = extract_features(self.make_test_loader, predict, self.test_samples, f"{what}, test")

        def measured() -> tuple[float, float]:
            task = Task.of(self.name, self.class_names, train, test, kind="linear")
            x, y = task.train.features, task.train.labels
            chosen = best_of_bank(
                *(x, y, task.test.features, task.test.labels, len(self.class_names), development(y, task.train.uids)),
                Layout(1, x.shape[1], has_patches=False),
                steps=self.steps,
                device="cuda" if torch.cuda.is_available() else "cpu",
            )
            return chosen.accuracy, chosen.head.rate

        accuracy, rate = on_rank_zero(measured)
        yield "top1", accuracy
        yield "lr", rate
