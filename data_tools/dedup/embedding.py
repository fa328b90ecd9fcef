"""An optional last judge of pairs: a user's model, which turns pictures into vectors.

It sees only pairs whose hashes are near, so its cost does not grow with the number of images. The model is handed in:
what knows networks is no part of these tools.

Features of most models lie in a narrow cone, where any two pictures have a cosine of 0.9, each model's own. An index
whitens them by its test images, as is usual for retrieval (Jegou and Chum, 2012): then those of different pictures are
orthogonal, and one threshold means about the same for every model.
"""

from collections.abc import Iterable
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


def whitening_of(batches: Iterable[np.ndarray], dimensions: int) -> np.ndarray:
    """How vectors are centred and whitened by some of them: float32 (D + 1, D), the mean and below it the matrix.

    The covariance is that of these N vectors and of D more that would lie equally in all directions, so that a few
    vectors are centred rather than whitened. Without any two that differ, vectors stay as they are.

    Args:
        batches: the vectors, (n, D) at a time; rows of zeros are none.
        dimensions: D.
    """
    count, total, products = 0, np.zeros(dimensions), np.zeros((dimensions, dimensions))
    for batch in batches:
        vectors = batch[batch.any(axis=1)].astype(np.float64)
        count, total, products = count + len(vectors), total + vectors.sum(axis=0), products + vectors.T @ vectors
    mean = total / max(count, 1)
    covariance = products / max(count, 1) - np.outer(mean, mean)
    size = np.trace(covariance) / dimensions
    if size < 1e-12:
        return np.concatenate([np.zeros((1, dimensions)), np.eye(dimensions)]).astype(np.float32)
    smoothed = (count * covariance + dimensions * size * np.eye(dimensions)) / (count + dimensions)
    values, directions = np.linalg.eigh(smoothed)
    return np.concatenate([mean[None], directions / np.sqrt(values)]).astype(np.float32)


def whitened(vectors: np.ndarray, whitening: np.ndarray) -> np.ndarray:
    """Vectors (n, D) as `whitening_of` says, each of length 1; rows of zeros stay zeros."""
    out = (vectors - whitening[0]) @ whitening[1:] * vectors.any(axis=1, keepdims=True)
    lengths = np.linalg.norm(out, axis=1, keepdims=True)
    return (out / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Between two vectors of length 1, three decimals."""
    return round(float(one @ other), 3)
