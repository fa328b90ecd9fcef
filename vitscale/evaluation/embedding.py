"""Representations of single pictures, for de-duplication: every process opens the model for itself."""

import hashlib
import io
import json
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import torch

from vitscale.data.augmentation import EvalTransform, views_of
from vitscale.evaluation.finished import FinishedModel, OfWeights
from vitscale.ground.errors import DataError, RecipeError


@dataclass(frozen=True)
class Embedder:
    """Picture -> representation by a finished model, kept as path and digest so that other processes can be given it.

    Attributes:
        title: the model's name.
        sha256: of the weights and of how pictures become the model's input.
        dimensions: D, the width of the representation.
        step: of a run's checkpoint; None for weights.
    """

    source: Path
    title: str
    sha256: str
    dimensions: int
    step: int | None = None
    weights: OfWeights | None = field(default=None, compare=False)  # covered by the digest

    @classmethod
    def of(cls, source: Path, weights: OfWeights | None = None) -> Self:
        """The model of a source as it is now; for a run, its newest checkpoint. Raises as `FinishedModel` does."""
        model = FinishedModel(source.absolute(), weights=weights, on_cpu=True)
        pixels = np.zeros((model.image_size, model.image_size, 3), np.uint8)
        step = model.step if model.recipe is not None else None
        return cls(source.absolute(), model.title, _digest(model), len(_representation(model, pixels)), step, weights)

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        """The representation, float32 (D,), of a picture, uint8 (height, width, 3), as evaluation sees it.

        It is computed by one core. Raises `DataError` if the weights have changed, and as `FinishedModel` does.
        """
        return _representation(_opened(self), rgb)


@lru_cache(maxsize=1)
def _opened(embedder: Embedder) -> FinishedModel:
    torch.set_num_threads(1)  # a worker process has one core
    with redirect_stderr(io.StringIO()):  # the process that made the embedder has printed these notes already
        model = FinishedModel(embedder.source, (), embedder.step, weights=embedder.weights, on_cpu=True)
    if _digest(model) != embedder.sha256:
        raise DataError(f"{embedder.source}: the weights have changed since the command was started; repeat it")
    return model


@torch.inference_mode()
def _representation(model: FinishedModel, rgb: np.ndarray) -> np.ndarray:
    height, width, _ = rgb.shape
    picture, transform = (rgb.tobytes(), height, width), EvalTransform.of(model.eval_crop)
    view = views_of([picture], transform, model.image_size, are_raw=True)
    return model.predict(view).pooled[0].float().numpy()


def _digest(model: FinishedModel) -> str:
    """SHA-256 of everything that a representation depends on."""
    seen = {name: value for name, value in model.policy().items() if name != "step"}
    digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode())
    for name, value in model.parameters():
        if value.device.type == "meta":
            raise RecipeError(f"{model.source}: the memory of this machine is too small to compare pictures with it")
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
