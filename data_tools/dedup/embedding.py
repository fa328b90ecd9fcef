"""An optional last judge of pairs: a user's TorchScript model that turns pictures into vectors.

Such as SSCD (Pizzi et al., "A Self-Supervised Descriptor for Image Copy Detection", 2022). It sees only pairs whose
hashes are near, so its cost does not grow with the number of images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitscale.errors import DataError, RecipeError

MODEL_NAME = "embedding.pt"
MAX_SIDE = 4096
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, as such models expect
_STD = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True)
class EmbeddingModel:
    """A user's TorchScript file, and the side of the pictures that it takes, in pixels.

    Raises RecipeError for a side that no model has.
    """

    path: str
    side: int

    def __post_init__(self) -> None:
        if not 1 <= self.side <= MAX_SIDE:
            raise RecipeError(f"{self.path}: pictures of {self.side} pixels a side; expected 1 to {MAX_SIDE:,}")


class Embedder:
    """A model, and the vectors of an index's test images, if any."""

    def __init__(self, path: str | Path, side: int, vectors: np.ndarray | None = None) -> None:
        """Load a TorchScript file, which takes float32 (1, 3, `side`, `side`), normalised as ImageNet's, and gives
        float32 (1, D).

        Raises RecipeError for a file that is none.
        """
        import torch

        torch.set_num_threads(1)  # a worker process has one core
        try:
            self._model = torch.jit.load(str(path), map_location="cpu").eval()
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise RecipeError(f"{path}: not a TorchScript model ({str(error).splitlines()[0]})") from error
        self._path, self._side, self._vectors = path, side, vectors

    def dimensions(self) -> int:
        """D, found by trying the model. Raises as `vector`."""
        side = self._side
        return len(self.vector(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)))

    def vector(self, rgb: np.ndarray) -> np.ndarray:
        """The vector of a picture, uint8 (height, width, 3): float32 (D,), of length 1; zeros if the model gives such.

        Raises DataError if the model does not take the picture, or gives something else than one vector of numbers.
        """
        import torch

        side = self._side
        pixels = Image.fromarray(rgb).resize((side, side), Image.Resampling.BILINEAR)
        values = (np.asarray(pixels, np.float32) / 255 - _MEAN) / _STD
        batch = torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))[None]
        try:
            with torch.inference_mode():
                out: Any = self._model(batch)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DataError(f"{self._path}: does not take float32 {tuple(batch.shape)} ({reason})") from error
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else None
        if shape is None or len(shape) != 2 or shape[0] != 1 or shape[1] < 1:
            given = f"{type(out).__name__}" if shape is None else f"shape {shape}"
            raise DataError(f"{self._path}: gives {given} for one picture; expected a tensor of shape (1, D)")
        vector = out[0].to(torch.float32).numpy()
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length):
            raise DataError(f"{self._path}: gives a vector of length {length}")
        return vector / (length or 1.0)

    def cosine(self, rgb: np.ndarray, image: int) -> float:
        """Between a picture and an image of the index, three decimals."""
        assert self._vectors is not None
        return round(float(self.vector(rgb) @ self._vectors[image]), 3)
