"""Predictions for image files: classes and their probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from vitscale.data.augmentation import EvalTransform
from vitscale.data.preview import views_of
from vitscale.data.shards import MANIFEST_NAME
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions, Reject, store_image
from vitscale.evaluation.finished import FinishedModel
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.ranks import gather

_AT_ONCE = 64  # images per process


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for a file: (class, probability), most probable first, or why the file is not an image."""

    file: str
    classes: Sequence[tuple[str, float]] = ()
    problem: str | None = None

    def plain(self) -> dict[str, Any]:
        """The prediction as plain data for JSON."""
        if self.problem is not None:
            return {"file": self.file, "error": self.problem}
        return {"file": self.file, "top": [{"class": name, "probability": p} for name, p in self.classes]}


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The given files, and those below given folders with an image's suffix, sorted, without hidden ones.

    Raises `DataError` if there are none.
    """
    found = []
    for path in paths:
        if path.is_dir():
            below = [file for file in sorted(path.rglob("*")) if file.name.lower().endswith(IMAGE_SUFFIXES)]
            visible = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
            if not visible and (path / MANIFEST_NAME).is_file():
                raise DataError(
                    f"{path}: a dataset; `vitscale evaluate` measures on one, and `vitscale shards export` writes "
                    "its images as files"
                )
            if not visible:
                raise DataError(
                    f"{path}: no image in this folder; expected files that end in {', '.join(IMAGE_SUFFIXES)}"
                )
            found += visible
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: there is no such file or folder")
    return found


def predict_files(model: FinishedModel, files: Sequence[Path], top: int) -> Iterator[Prediction]:
    """Predictions in the order of the files, on every process; the processes share the work.

    Raises `RecipeError` for a model without classes.
    """
    if model.num_classes is None:
        raise RecipeError(f"{model.source} has no classes to be predicted")
    processes, own = model.accelerator.num_processes, model.accelerator.process_index
    for first in range(0, len(files), _AT_ONCE * processes):
        group = files[first : first + _AT_ONCE * processes]
        part = [asdict(prediction) for prediction in _predicted(model, group[own::processes], top)]
        parts = gather(part) if dist.is_initialized() else [part]
        yield from (Prediction(**parts[at % processes][at // processes]) for at in range(len(group)))


def pictures_of(model: FinishedModel, files: Sequence[Path]) -> Tensor:
    """Image files as the model sees them, uint8 (n, S, S, 3). Raises `DataError` for a file that is not an image."""
    stored = {file: _stored(file) for file in files}
    if bad := [(file, why) for file, why in stored.items() if isinstance(why, str)]:
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0][0]}: {bad[0][1]}{others}; take it out, or name another folder")
    jpegs = [found for found in stored.values() if not isinstance(found, str)]
    return views_of(jpegs, EvalTransform.of(model.eval_crop), model.image_size)


def _predicted(model: FinishedModel, files: Sequence[Path], top: int) -> list[Prediction]:
    found: dict[int, Prediction] = {}
    jpegs = {}
    for at, file in enumerate(files):
        stored = _stored(file)
        if isinstance(stored, str):
            found[at] = Prediction(str(file), problem=stored)
        else:
            jpegs[at] = stored
    if jpegs:
        views = views_of(list(jpegs.values()), EvalTransform.of(model.eval_crop), model.image_size)
        logits = model.predict(views).logits
        assert logits is not None, "a model with classes has logits"
        logits = logits.float()
        probabilities = (logits.softmax(dim=1) if model.loss == "softmax" else logits.sigmoid()).cpu()
        values, indices = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        for at, row, places in zip(jpegs, values.tolist(), indices.tolist(), strict=True):
            names = [model.class_names[place] if model.class_names else f"class {place}" for place in places]
            found[at] = Prediction(str(files[at]), list(zip(names, row, strict=True)))
    return [found[at] for at in range(len(files))]


def _stored(file: Path) -> tuple[bytes, int, int] | str:
    """(JPEG, height, width) as conversion would store the file, or why it cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    stored = store_image(content, ImageOptions())
    return stored.reason if isinstance(stored, Reject) else (stored.jpeg, stored.height, stored.width)
