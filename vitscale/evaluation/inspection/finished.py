"""Inspects finished models of any source, for the figures of `vitscale inspect` and of pages of results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitscale.data.shards import MANIFEST_NAME, Manifest
from vitscale.evaluation.finished import FinishedModel
from vitscale.evaluation.inspection.looking import Findings, Part, look, parts_of
from vitscale.evaluation.inspection.representation import nearest
from vitscale.evaluation.prediction import image_files, pictures_of
from vitscale.ground.errors import DataError, RecipeError

_NEIGHBOURS = 6

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what is being done, its number of images) -> a context giving a function to call with the number of images done."""


class Pictures(NamedTuple):
    """Pictures for a model: uint8 (n, S, S, 3), their uids (n,), and the dataset they are from, if any."""

    images: Tensor
    uids: Tensor
    dataset: Manifest | None


def pictures_from(model: FinishedModel, where: str, count: int) -> Pictures:
    """`count` images: spread evenly over a folder, or the first ones of a dataset. Raises as `first_of`."""
    path = Path(where)
    if not path.is_file() and (not path.is_dir() or (path / MANIFEST_NAME).exists()):
        return first_of(model, where, count)
    files = image_files([path])
    files = [files[at * len(files) // count] for at in range(count)] if len(files) > count else files
    return without_dataset(pictures_of(model, files))


def without_dataset(images: Tensor) -> Pictures:
    """Pictures of no dataset."""
    return Pictures(images, torch.full((len(images),), -1), None)


def first_of(model: FinishedModel, dataset: str, count: int) -> Pictures:
    """The first `count` pictures of a dataset, whose stored order is shuffled. Raises `RecipeError` and `DataError`."""
    manifest = model.dataset(dataset)
    images: list[Tensor] = []
    uids: list[Tensor] = []
    with closing(model.loader(manifest)()) as loader:  # type: ignore[type-var]
        for batch in loader:
            images.append(batch.images[batch.mask].clone())
            uids.append(batch.uids[batch.mask].clone())
            if sum(map(len, images)) >= count:
                break
    if not sum(map(len, images)):
        raise DataError(f"{manifest.where}: no picture in it can be read")
    return Pictures(torch.cat(images)[:count], torch.cat(uids)[:count], manifest)


def inspect_model(
    model: FinishedModel,
    seen: Pictures,
    wanted: Sequence[Part] | None = None,
    *,
    pictures: int = 6,
    neighbours: str | None = None,
    progress: Progress = lambda what, total: nullcontext(lambda count: None),
) -> Findings:
    """Inspect a model while it sees pictures.

    Args:
        wanted: what to inspect; by default all that the model has.
        pictures: the number of pictures, the first ones, for which maps, colours and neighbours are made.
        neighbours: a dataset in which to find the pictures most similar to them.

    Raises `RecipeError` for parts that the model does not have, and under several processes.
    """
    if model.accelerator.num_processes > 1:
        raise RecipeError("inspection is one process: start it without torchrun").on_all_ranks()
    among = None if neighbours is None else model.dataset(neighbours)
    backbone = model.backbone
    with model.reading(backbone.anatomy().embedding), progress("pictures", len(seen.images)) as done:
        parts = parts_of(backbone, model.title, wanted)
        found = look(backbone, model.predict, seen.images, model.title, parts, pictures=pictures, seen=done)
    if among is None:
        return found
    shown = found.pictures
    is_own = seen.dataset is not None and seen.dataset.sha256 == among.sha256
    own = seen.uids[: len(shown)] if is_own else torch.full((len(shown),), -1)
    with progress("neighbours", among.num_samples) as done:

        def represented() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for batch in model.loader(among)():
                pooled = model.predict(batch.images).pooled.cpu()
                yield batch.images[batch.mask], pooled[batch.mask], batch.uids[batch.mask]
                done(int(batch.mask.sum()))

        found.neighbours = nearest(model.predict(shown).pooled, own, represented(), _NEIGHBOURS)
    return found
