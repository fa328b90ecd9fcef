"""The representation of single pictures, by a model that every process opens for itself: for de-duplication."""

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

from vitscale.data import EvalTransform
from vitscale.data.views import view_of_pixels
from vitscale.errors import DataError, RecipeError
from vitscale.evaluation.finished import FinishedModel, OfWeights


@dataclass(frozen=True)
class Embedder:
    """A finished model as its place and digest, to be handed to other processes: picture -> representation.

    Attributes:
        source: a run's directory, or weights.
        title: the model's name.
        sha256: of the weights, and of how pictures become the model's input.
        dimensions: D of the representation.
        step: of a run's checkpoint.
        weights: what a file of weights does not tell.
    """

    source: Path
    title: str
    sha256: str
    dimensions: int
    step: int | None = None
    weights: OfWeights | None = field(default=None, compare=False)  # which the digest covers

    @classmethod
    def of(cls, source: Path, weights: OfWeights | None = None) -> Self:
        """The model of a source as it is now; of a run the newest checkpoint. Raises as `FinishedModel` does."""
        model = FinishedModel(source.absolute(), weights=weights, on_cpu=True)
        pixels = np.zeros((model.image_size, model.image_size, 3), np.uint8)
        step = model.step if model.recipe is not None else None
        return cls(source.absolute(), model.title, _digest(model), len(_representation(model, pixels)), step, weights)

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        """A picture, uint8 (height, width, 3), as evaluation sees it -> float32 (D,), by one core of this machine.

        Raises `DataError` where the weights are no more what they were, and as `FinishedModel` does.
        """
        return _representation(_opened(self), rgb)


@lru_cache(maxsize=1)
def _opened(embedder: Embedder) -> FinishedModel:
    torch.set_num_threads(1)  # a worker process has one core
    with redirect_stderr(io.StringIO()):  # whoever made the embedder was told
        model = FinishedModel(embedder.source, (), embedder.step, weights=embedder.weights, on_cpu=True)
    if _digest(model) != embedder.sha256:
        raise DataError(f"{embedder.source}: the weights have changed since the command was begun; repeat it")
    return model


@torch.inference_mode()
def _representation(model: FinishedModel, rgb: np.ndarray) -> np.ndarray:
    view = view_of_pixels(rgb, EvalTransform.of(model.eval_crop), model.image_size)
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
