"""A user's model as the last judge: a TorchScript module that turns pictures into vectors, alike for alike ones.

Such as SSCD (Pizzi et al., "A Self-Supervised Descriptor for Image Copy Detection", 2022). It sees only pairs whose
hashes are near, so its cost does not grow with the number of images.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitscale.errors import DataError, RecipeError

if TYPE_CHECKING:
    from data_tools.dedup.index import Index

MODEL_NAME = "embedding.pt"
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, as such models expect
_STD = np.array([0.229, 0.224, 0.225], np.float32)


class Embedder:
    """A model, and the vectors of an index's test images, if any."""

    def __init__(self, path: str | Path, side: int, vectors: np.ndarray | None = None) -> None:
        """Load a TorchScript file, which takes float32 (N, 3, `side`, `side`), normalised as ImageNet's.

        Raises RecipeError for a file that is none.
        """
        import torch

        torch.set_num_threads(1)  # a worker process has one core
        try:
            self._model = torch.jit.load(str(path), map_location="cpu").eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise RecipeError(f"{path}: not a TorchScript model ({str(error).splitlines()[0]})") from error
        self._path, self._side, self._vectors = path, side, vectors

    @classmethod
    def of_index(cls, index: "Index") -> "Embedder":
        """The model that an index was made with."""
        assert index.embedding is not None
        return cls(index.folder / MODEL_NAME, index.embedding["side"], index.embeddings)

    def vector(self, rgb: np.ndarray) -> np.ndarray:
        """The vector of a picture, uint8 (height, width, 3): float32 (D,), of length 1.

        Raises DataError if the model does not take the picture, or gives something else than one vector.
        """
        import torch

        side = self._side
        pixels = Image.fromarray(rgb).resize((side, side), Image.Resampling.BILINEAR)
        values = (np.asarray(pixels, np.float32) / 255 - _MEAN) / _STD
        batch = torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))[None]
        try:
            with torch.inference_mode():
                out: Any = self._model(batch)
            vector = out.to(torch.float32).numpy().reshape(len(batch), -1)[0]
        except (RuntimeError, AttributeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise DataError(f"{self._path}: does not take float32 {tuple(batch.shape)} ({reason})") from error
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or length == 0:
            raise DataError(f"{self._path}: gives a vector of length {length}")
        return vector / length

    def cosine(self, rgb: np.ndarray, image: int) -> float:
        """Between a picture and an image of the index, three decimals."""
        assert self._vectors is not None
        return round(float(self.vector(rgb) @ self._vectors[image]), 3)
