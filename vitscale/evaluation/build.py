"""Builds the evaluators that a recipe asks for, with loaders over their datasets."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest
from vitscale.evaluation.classification import Validation
from vitscale.evaluation.contract import Evaluator, Loaders, MakeLoader
from vitscale.evaluation.fewshot import PAPER_L2S, Again, FewShot, NearestNeighbours, OfSplits, SharedL2FewShot
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.extensions import implementation
from vitscale.ground.wording import counted
from vitscale.objectives.build import objective_class
from vitscale.recipe import EvalCrop, Recipe

Made = TypeVar("Made", bound=OfSplits)


def build_evaluators(recipe: Recipe, class_names: Sequence[str], *, rank: int = 0, world: int = 1) -> list[Evaluator]:
    """The recipe's evaluators of a model whose outputs are `class_names`, for one rank of `world`.

    Raises `DataError` if a validation set's classes are not the model's, and `RecipeError` for evaluators of other
    packages that are not available.
    """
    evaluators: list[Evaluator] = []
    settings, loader = recipe.evaluation, partial(evaluation_loader, recipe, rank=rank, world=world)
    if settings.validation is not None:
        path = recipe.dataset_path(settings.validation)
        manifest = Manifest.load(path)
        check_class_names(path, manifest.class_names, class_names)
        loss = objective_class(recipe).validation_loss(recipe)
        expected = samples_expected(recipe, manifest)
        evaluators.append(Validation("validation", loader(manifest, recipe.data.eval_crop), loss, expected))
    if settings.fewshot is not None:
        fewshot, tasks = settings.fewshot, []
        for task in fewshot.tasks:
            splits = labelled_splits(recipe, task.train, task.test)
            name, l2 = (task.name, PAPER_L2S[0]) if fewshot.l2 == "shared" else (f"fewshot/{task.name}", fewshot.l2)
            how = {"shots": fewshot.shots, "seeds": range(fewshot.seeds), "l2": l2}
            if recipe.data.bad_samples == "error":  # otherwise a sample's place in a pass is not its row
                how["again"] = Again(partial(loader, splits[0], fewshot.crop))
            tasks.append(on_splits(FewShot, name, recipe, splits, fewshot.crop, loader, **how))
        evaluators += [SharedL2FewShot("fewshot", tasks)] if fewshot.l2 == "shared" else tasks
    if settings.knn is not None:
        knn = settings.knn
        voting, tested = labelled_splits(recipe, knn.train, knn.test)
        if max(knn.k) > (count := voting.num_samples):
            raise RecipeError(f"evaluation.knn.k {max(knn.k)}: {voting.where} has {counted(count, 'sample')} to vote")
        splits = voting, tested
        evaluators.append(on_splits(NearestNeighbours, "knn", recipe, splits, knn.crop, loader, numbers=knn.k))
    for block in settings.evaluators:
        evaluator = implementation(block.implementation, Evaluator).of(block, recipe, class_names, loader)
        if evaluator.name in [other.name for other in evaluators]:
            raise RecipeError(f"evaluation.evaluators: two evaluators have one name: {evaluator.name!r}")
        evaluators.append(evaluator)
    return evaluators


def labelled_splits(recipe: Recipe, train: str, test: str) -> tuple[Manifest, Manifest]:
    """The manifests to learn from and to be tested on. Raises `DataError` unless both have the same classes."""
    test_path = recipe.dataset_path(test)
    learned, tested = Manifest.load(recipe.dataset_path(train)), Manifest.load(test_path)
    if not learned.class_names:
        raise DataError(
            f"{learned.where} names no classes to learn from; convert the data with class folders or --classes"
        )
    check_class_names(test_path, tested.class_names, learned.class_names)
    return learned, tested


def on_splits(
    make: type[Made],
    name: str,
    recipe: Recipe,
    splits: tuple[Manifest, Manifest],
    crop: EvalCrop,
    loaders: Loaders,
    **settings: Any,
) -> Made:
    """An evaluator that learns from the first of two splits and is tested on the second."""
    train, test = splits
    return make(
        *(name, loaders(train, crop), loaders(test, crop), train.class_names),
        train_samples=samples_expected(recipe, train),
        test_samples=samples_expected(recipe, test),
        **settings,
    )


def evaluation_loader(
    recipe: Recipe, manifest: Manifest, crop: EvalCrop, rows: np.ndarray | None = None, *, rank: int = 0, world: int = 1
) -> MakeLoader:
    """Makes loaders over a dataset's samples, or some rows, at the recipe's size. Raises `DataError` if it has none."""
    reading = Reading.of(recipe.data, pinned=torch.cuda.is_available())
    size, batch = recipe.data.image_size, recipe.evaluation.batch
    return exact_pass(manifest, EvalTransform.of(crop), size, batch, reading, rows, rank=rank, world=world)


def exact_pass(
    manifest: Manifest,
    transform: EvalTransform,
    image_size: int,
    batch: int,
    reading: Reading,
    rows: np.ndarray | None = None,
    *,
    rank: int = 0,
    world: int = 1,
) -> MakeLoader:
    """Makes one rank's loaders, `batch` samples of this rank at a time; all ranks together see every sample once, or
    those of `rows` alone (see `EvalOrder`).
    """
    if manifest.num_samples == 0:
        raise DataError(f"{manifest.where}: there are no samples to evaluate")
    order = EvalOrder([shard.num_selected for shard in manifest.shards], batch * world, rows)
    settings: dict[str, Any] = {"image_size": image_size, "transform": transform, "reading": reading.for_evaluation()}
    return partial(Loader, manifest, order, rank=rank, world=world, **settings)


def samples_expected(recipe: Recipe | None, manifest: Manifest) -> int | None:
    """The number of samples that an exact pass over a dataset sees; None if the recipe lets damaged ones be masked."""
    return manifest.num_samples if recipe is None or recipe.data.bad_samples == "error" else None


def check_class_names(dataset: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """Raise `DataError` unless a dataset's class names are the expected ones, in the same order."""
    if tuple(found) == tuple(expected):
        return
    first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    difference = (
        f"class {first} is {found[first]!r} here and {expected[first]!r} there"
        if first is not None
        else f"{len(found)} classes here and {len(expected)} there"
    )
    raise DataError(
        f"{dataset}: its classes are not those it is evaluated against ({difference}); "
        f"convert it with vitscale-convert --classes TRAINING_DATASET"
    )
