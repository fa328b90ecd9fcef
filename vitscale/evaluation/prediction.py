"""Predictions for pictures of any kind: classes and their probabilities."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from vitscale.data.augmentation import EvalTransform, views_of
from vitscale.data.shards import MANIFEST_NAME
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions, Reject, pixels_of, store_image
from vitscale.evaluation.finished import FinishedModel
from vitscale.ground.errors import DataError, RecipeError, os_errors
from vitscale.ground.ranks import gather
from vitscale.ground.storage import regular
from vitscale.ground.wording import finite
from vitscale.models import Outputs
from vitscale.recipe import EvalCrop

Picture = str | os.PathLike[str] | bytes | Image.Image | np.ndarray
"""A file, or its bytes, seen as if it had been converted; or pixels, seen as they are: an image of Pillow, or an array,
uint8 (height, width), (height, width, 3) or (height, width, 4)."""
_MOST_BYTES = 1 << 30
AT_ONCE = 64  # the number of images that a process forwards at once
_PIXELS = "uint8 from 0 to 255 of shape (height, width, 3), (height, width, 4) or (height, width)"


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for a picture: (class, probability), most probable first, or why it is not an image.

    `file` is its path; of pictures that have none, their number.
    """

    file: str
    classes: Sequence[tuple[str, float]] = ()
    problem: str | None = None

    def plain(self) -> dict[str, Any]:
        """The prediction as plain data for JSON."""
        if self.problem is not None:
            return {"file": self.file, "error": self.problem}
        return {"file": self.file, "top": [{"class": name, "probability": finite(p)} for name, p in self.classes]}


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The files, and sorted those below folders with an image's suffix, not hidden. Raises `DataError` for none."""
    files = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder")
        if not path.is_dir():
            files.append(path)
            continue
        with os_errors(f"{path}: cannot be read"):
            below = [file for file in sorted(path.rglob("*")) if file.name.lower().endswith(IMAGE_SUFFIXES)]
        visible = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not visible and (path / MANIFEST_NAME).is_file():
            raise DataError(
                f"{path}: a dataset; `vitscale evaluate` measures on one, and `vitscale shards export` writes its "
                "images as files"
            )
        if not visible:
            raise DataError(f"{path}: no image in this folder; expected files that end in {', '.join(IMAGE_SUFFIXES)}")
        files += visible
    return files


def predict_files(model: FinishedModel, pictures: Sequence[Picture], top: int) -> Iterator[Prediction]:
    """Predictions in order, on every process; they share the work. Raises `RecipeError` for a model without classes."""
    if model.num_classes is None:
        raise RecipeError(f"{model.source} has no classes to be predicted")
    processes, rank = model.accelerator.num_processes, model.accelerator.process_index
    for first in range(0, len(pictures), AT_ONCE * processes):
        group = range(first, min(first + AT_ONCE * processes, len(pictures)))
        named = [(name_of(pictures[at], at), pictures[at]) for at in group[rank::processes]]
        part = [asdict(prediction) for prediction in _predicted(model, named, top)]
        parts = gather(part) if dist.is_initialized() else [part]
        yield from (Prediction(**parts[at % processes][at // processes]) for at in range(len(group)))


def pictures_of(model: FinishedModel, pictures: Sequence[Picture], first: int = 0) -> Tensor:
    """Pictures, from number `first` on, uint8 (n, S, S, 3). Raises `DataError` for what is not an image."""
    seen = [view_of(picture, model.eval_crop, model.image_size) for picture in pictures]
    if bad := [(at, view) for at, view in enumerate(seen) if isinstance(view, Reject)]:
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        at, rejected = bad[0]
        raise DataError(
            f"{name_of(pictures[at], first + at)}: {rejected.reason}{others}; take it out, or name another folder"
        )
    return torch.stack([view for view in seen if not isinstance(view, Reject)])


def view_of(picture: Picture, crop: EvalCrop, image_size: int) -> Tensor | Reject:
    """What a model sees of a picture, uint8 (S, S, 3), or why it cannot be seen."""
    transform = EvalTransform.of(crop)
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))):
            return Reject(f"an array {picture.dtype} {picture.shape}; expected pixels, {_PIXELS}")
        if 0 in picture.shape:
            return Reject(f"an array {picture.shape} without pixels")
        picture = Image.fromarray(picture)
    if isinstance(picture, Image.Image):
        pixels = pixels_of(picture)
        if isinstance(pixels, Reject):
            return pixels
        height, width, _ = pixels.shape
        return views_of([(pixels.tobytes(), height, width)], transform, image_size, are_raw=True)[0]
    if not isinstance(picture, bytes):
        try:
            with open(picture, "rb", opener=regular) as file:  # a FIFO of a stranger's would wait for ever
                picture = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            return Reject(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(picture) > _MOST_BYTES:
        return Reject(f"more than {_MOST_BYTES:,} bytes")
    stored = store_image(picture, ImageOptions())
    if isinstance(stored, Reject):
        return stored
    return views_of([(stored.jpeg, stored.height, stored.width)], transform, image_size)[0]


def name_of(picture: Picture, at: int) -> str:
    """How messages call a picture: by its path, or by its number from 0."""
    return str(picture) if isinstance(picture, str | os.PathLike) else f"picture {at}"


def named_classes(model: FinishedModel, outputs: Outputs, top: int) -> list[list[tuple[str, float]]]:
    """(class, probability) of n pictures' outputs, for each the `top` most probable, the most probable first."""
    assert outputs.logits is not None, "a model with classes has logits"
    logits = outputs.logits.float()
    probabilities = (logits.softmax(dim=1) if model.loss == "softmax" else logits.sigmoid()).cpu()
    num_classes = probabilities.shape[1]
    names = model.class_names or [f"class {place}" for place in range(num_classes)]
    values, indices = probabilities.topk(min(top, num_classes), dim=1)
    return [
        [(names[place], value) for place, value in zip(places, row, strict=True)]
        for places, row in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _predicted(model: FinishedModel, named: Sequence[tuple[str, Picture]], top: int) -> list[Prediction]:
    seen = [view_of(picture, model.eval_crop, model.image_size) for _, picture in named]
    views = [view for view in seen if not isinstance(view, Reject)]
    rows = iter(named_classes(model, model.predict(torch.stack(views)), top) if views else ())
    return [
        Prediction(name, problem=view.reason) if isinstance(view, Reject) else Prediction(name, next(rows))
        for (name, _), view in zip(named, seen, strict=True)
    ]
