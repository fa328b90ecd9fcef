"""Checks that a model is not evaluated on samples that it is trained on."""

from collections.abc import Iterator, Sequence
from typing import Literal

from vitscale.data.shards import Manifest
from vitscale.data.shards.overlap import overlap
from vitscale.ground.errors import DataError
from vitscale.recipe import Recipe

Overlap = Literal["refuse", "allow"]
"""What samples in both of two splits lead to: an error, or a note."""


def check_splits(recipe: Recipe, train: Manifest) -> list[str]:
    """Compare every split that a recipe evaluates on with the training samples; returns a line for each overlap.

    Args:
        recipe: the recipe.
        train: the manifest of `data.train`.

    Raises `DataError` if they have samples in common, unless `evaluation.overlap` allows it, and for splits that are
    missing or damaged; `StorageError` for a URL that does not answer.
    """
    found = list(_overlaps(recipe, train))
    judge(found, recipe.evaluation.overlap, "--set evaluation.overlap=allow")
    return found


def judge(found: Sequence[str], overlap: Overlap, allow: str) -> None:
    """Raise `DataError` if there are overlaps between splits and they are refused.

    Args:
        found: a line for each overlap.
        overlap: whether overlaps are refused.
        allow: the option that allows them, for the message.
    """
    if found and overlap == "refuse":
        raise DataError(
            "\n".join(found)
            + "\nResults on samples that a model was trained on say nothing about unseen ones. Evaluate on a separate "
            "split (vitscale shards split), or leave the copies out of training (vitscale dedup, which also "
            f"finds those with other bytes). If this is intended: {allow}"
        )


def common_samples(dataset: Manifest, train: Manifest) -> str | None:
    """A line that says how many samples of a dataset are also in another; None if none are.

    Raises as `overlap` does.
    """
    stored, equal = overlap(dataset, train)
    if not stored and not equal:
        return None
    of_them = f", {equal:,} of them by equal bytes" if equal else ""
    return (
        f"{stored + (equal or 0):,} of the {dataset.num_samples:,} samples of {dataset.where} are among those of "
        f"{train.where}{of_them}"
    )


def _overlaps(recipe: Recipe, train: Manifest) -> Iterator[str]:
    settings = recipe.evaluation
    if settings.validation is not None:
        validation = Manifest.load(recipe.dataset_path(settings.validation))
        if found := common_samples(validation, train):
            yield f"evaluation.validation: {found}"
    for task in settings.fewshot.tasks if settings.fewshot is not None else ():
        test = Manifest.load(recipe.dataset_path(task.test))
        for other in (train, Manifest.load(recipe.dataset_path(task.train))):
            if found := common_samples(test, other):
                yield f"evaluation.fewshot, the test samples of {task.name}: {found}"
