"""Checks that a model is not evaluated on samples that it is trained on."""

from collections.abc import Iterator, Sequence
from typing import Literal

from vitscale.data.shards import Manifest
from vitscale.data.shards.info import overlap
from vitscale.ground.errors import DataError
from vitscale.recipe import Recipe
from vitscale.recipe.evaluation import Evaluation

Overlap = Literal["refuse", "allow"]  # what samples in both of two splits lead to: an error, or a note


def evaluated_splits(settings: Evaluation) -> Iterator[tuple[str, str | None, str]]:
    """(what messages call it, the split that an evaluator learns from besides, the one that it is tested on)."""
    if settings.validation is not None:
        yield "evaluation.validation", None, settings.validation
    for task in settings.fewshot.tasks if settings.fewshot is not None else ():
        yield f"evaluation.fewshot, the test samples of {task.name}", task.train, task.test
    if settings.knn is not None:
        yield "evaluation.knn.test", settings.knn.train, settings.knn.test
    for number, evaluator in enumerate(settings.evaluators):
        if (splits := evaluator.splits()) is not None:
            yield f"evaluation.evaluators.{number}.test", *splits[:2]


def check_splits(recipe: Recipe, train: Manifest) -> list[str]:
    """Compare every split that a recipe evaluates on with those of `data.train`; returns a line for each overlap.

    Raises `DataError` if they have samples in common, unless `evaluation.overlap` allows it, and for splits that are
    missing or damaged; `StorageError` for a URL that does not answer.
    """
    overlaps = []
    for key, learned, tested in evaluated_splits(recipe.evaluation):
        test = Manifest.load(recipe.dataset_path(tested))
        for other in (train, *([] if learned is None else [Manifest.load(recipe.dataset_path(learned))])):
            if line := common_samples(test, other):
                overlaps.append(f"{key}: {line}")
    judge(overlaps, recipe.evaluation.overlap, "--set evaluation.overlap=allow")
    return overlaps


def judge(overlaps: Sequence[str], overlap: Overlap, allow: str) -> None:
    """Raise `DataError` if there are overlaps, a line each, and they are refused; `allow` is the option that allows."""
    if overlaps and overlap == "refuse":
        raise DataError(
            "\n".join(overlaps)
            + "\nResults on samples that a model was trained on say nothing about unseen ones. Evaluate on a separate "
            "split (vitscale shards split), or leave the copies out of training (vitscale dedup, which also "
            f"finds those with other bytes). If this is intended: {allow}"
        )


def common_samples(dataset: Manifest, train: Manifest) -> str | None:
    """A line on how many samples are also in another dataset; None if none are. Raises as `overlap` does."""
    stored, equal = overlap(dataset, train)
    if not stored and not equal:
        return None
    of_them = f", {equal:,} of them by equal bytes" if equal else ""
    return (
        f"{stored + (equal or 0):,} of the {dataset.num_samples:,} samples of {dataset.where} are among those of "
        f"{train.where}{of_them}"
    )
