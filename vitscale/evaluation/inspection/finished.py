"""Inspects finished models of any source, for the figures of `vitscale inspect` and of pages of results."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from vitscale.data.shards import MANIFEST_NAME
from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.inspection.looking import Findings, Part, look, parts_of
from vitscale.evaluation.prediction import image_files, pictures_of
from vitscale.ground.errors import DataError, RecipeError


def pictures_from(model: FinishedModel, where: str, count: int) -> Tensor:
    """`count` images as a model sees them, uint8 (n, S, S, 3): spread evenly over a folder, or a dataset's first ones.

    Raises as `first_of`.
    """
    path = Path(where)
    if not path.is_file() and (not path.is_dir() or (path / MANIFEST_NAME).exists()):
        return first_of(model, where, count)
    files = image_files([path])
    files = [files[at * len(files) // count] for at in range(count)] if len(files) > count else files
    return pictures_of(model, files)


def first_of(model: FinishedModel, dataset: str, count: int) -> Tensor:
    """The first `count` pictures of a dataset, whose stored order is shuffled. Raises `RecipeError` and `DataError`."""
    manifest = model.dataset(dataset)
    images: list[Tensor] = []
    with closing(model.loader(manifest)()) as loader:  # type: ignore[type-var]
        for batch in loader:
            images.append(batch.images[batch.mask].clone())
            if sum(map(len, images)) >= count:
                break
    if not sum(map(len, images)):
        raise DataError(f"{manifest.where}: no picture in it can be read")
    return torch.cat(images)[:count]


def inspect_model(
    model: FinishedModel,
    images: Tensor,
    wanted: Sequence[Part] | None = None,
    *,
    pictures: int = 6,
    seen: Callable[[int], None] = lambda count: None,
) -> Findings:
    """Inspect a model while it sees images, uint8 (n, S, S, 3).

    Args:
        wanted: what to inspect; by default all that the model has.
        pictures: the number of images, the first ones, for which maps and colours are made.
        seen: called with the number of images done so far.

    Raises `RecipeError` for parts that the model does not have, and under several processes.
    """
    if model.accelerator.num_processes > 1:
        raise RecipeError("inspection is one process: start it without torchrun").on_all_ranks()
    backbone = model.backbone
    with model.reading(backbone.anatomy().embedding):
        parts = parts_of(backbone, model.title, wanted)
        return look(backbone, model.predict, images, model.title, parts, pictures=pictures, seen=seen)
