"""What measures the length of representations."""

from collections.abc import Iterator, Sequence
from typing import Self

import torch

import example_vision
from vitscale.data.shards import Manifest
from vitscale.evaluation import Evaluator, Loaders, MakeLoader, Predict
from vitscale.ground.ranks import reduce_sum
from vitscale.recipe import Recipe


class FeatureNorm(Evaluator):
    """The mean length over all samples of all ranks."""

    def __init__(self, name: str, make_loader: MakeLoader) -> None:
        self.name, self._make_loader = name, make_loader

    @classmethod
    def of(
        cls, block: example_vision.FeatureNorm, recipe: Recipe, class_names: Sequence[str], loaders: Loaders
    ) -> Self:
        return cls(block.name, loaders(Manifest.load(recipe.dataset_path(block.data)), recipe.data.eval_crop))

    def run(self, predict: Predict) -> Iterator[tuple[str, float]]:
        total = torch.zeros(2, dtype=torch.float64)
        for batch in self._make_loader():
            lengths = predict(batch.images).pooled.double().norm(dim=1).cpu()[batch.mask]
            total += torch.tensor([lengths.sum().item(), len(lengths)], dtype=torch.float64)
        length, samples = reduce_sum(total).tolist()
        yield "mean", length / samples
