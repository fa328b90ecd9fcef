"""An optional last judge of pairs: a user's model, which turns pictures into vectors.

It sees only pairs whose hashes are near, so its cost does not grow with the number of images. The model is handed in:
what knows networks is no part of these tools.
"""

from typing import Protocol

import numpy as np

from vitscale.errors import DataError


class Embedder(Protocol):
    """A model. It travels to every worker, so it can be pickled, and hashed: two of one digest are equal.

    Attributes:
        title: what people call the model.
        sha256: of its weights, and of how pictures become its input: vectors of another digest mean something else.
        dimensions: D of its vectors.
    """

    @property
    def title(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def dimensions(self) -> int: ...

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        """A picture, uint8 (height, width, 3) -> float32 (D,). Raises VitscaleError."""
        ...


def unit_vector(embedder: Embedder, rgb: np.ndarray) -> np.ndarray:
    """The vector of a picture, uint8 (height, width, 3): float32 (D,), of length 1; zeros if the model gives such.

    Raises DataError for numbers that are not finite, and as the model does.
    """
    vector = embedder(rgb)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        raise DataError(f"{embedder.title}: gives a vector of length {length}; are its weights finite?")
    return vector / np.float32(length or 1.0)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Between two vectors of length 1, three decimals."""
    return round(float(one @ other), 3)
