"""Whether what a model is evaluated on is among what it learns from."""

from collections.abc import Iterator, Sequence
from typing import Literal

from vitscale.errors import DataError
from vitscale.recipe import Recipe
from vitscale.shards import Manifest
from vitscale.shards.overlap import overlap

Overlap = Literal["refuse", "allow"]
"""What becomes of samples that two splits have in common: an error, or they are told."""


def check_splits(recipe: Recipe, train: Manifest) -> list[str]:
    """Compare every split that a recipe evaluates on with the training samples; lines to tell.

    Args:
        train: the manifest of `data.train`.

    Raises `DataError` where they have samples in common, unless `evaluation.overlap` allows it, and for splits that are
    missing or damaged; `StorageError` for a URL that does not answer.
    """
    found = list(_overlaps(recipe, train))
    judge(found, recipe.evaluation.overlap, "--set evaluation.overlap=allow")
    return found


def judge(found: Sequence[str], overlap: Overlap, allow: str) -> None:
    """Raise `DataError` where splits have samples in common and that is refused; `allow` is what lets them.

    `found` are the lines that tell of it.
    """
    if found and overlap == "refuse":
        raise DataError(
            "\n".join(found)
            + "\nWhat a model has learned by heart says nothing of what it has not seen. Evaluate on a "
            "split of its own (vitscale shards split), or leave the copies out of training (vitscale dedup, which also "
            f"finds those with other bytes). If it is meant: {allow}"
        )


def common_samples(dataset: Manifest, train: Manifest) -> str | None:
    """What to tell of the samples of a dataset that are among those of another; None where there are none.

    Raises as `overlap`.
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
