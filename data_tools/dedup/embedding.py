"""An optional last judge of pairs: a user's model that turns pictures into vectors.

It sees only pairs whose hashes are near, so its cost does not grow with the number of images. The model is passed in:
these tools contain no networks.

Features of most models lie in a narrow cone, where any two pictures have a cosine of about 0.9, a value that differs
between models. An index whitens them by its test images, as is usual for retrieval (Jegou and Chum, 2012): then those
of different pictures are orthogonal, and one threshold means about the same for every model.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from vitscale.ground.errors import DataError


class Embedder(Protocol):
    """A model. Sent to every worker, so it must be picklable, and hashable: two with the same digest are equal."""

    @property
    def title(self) -> str: ...  # what messages call it
    @property
    def sha256(self) -> str: ...  # of weights and input transform; vectors of different digests are not comparable
    @property
    def dimensions(self) -> int: ...  # length D of its vectors

    def __call__(self, rgb: np.ndarray) -> np.ndarray:
        """A picture, uint8 (height, width, 3) -> float32 (D,). Raises VitscaleError."""
        ...


def unit_vector(embedder: Embedder, rgb: np.ndarray) -> np.ndarray:
    """The unit vector of a picture, uint8 (height, width, 3): float32 (D,); zeros if the model returns zeros.

    Raises DataError for numbers that are not finite, and as the model does.
    """
    vector = embedder(rgb)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        raise DataError(f"{embedder.title}: gives a vector of length {length}; are its weights finite?")
    return vector / np.float32(length or 1.0)


def whitening_of(batches: Iterable[np.ndarray], dimensions: int) -> np.ndarray:
    """The centring and whitening fitted to some vectors: float32 (D + 1, D), the mean and below it the matrix.

    The covariance is that of these N vectors plus D more that lie equally in all directions, so that with few vectors
    the result centres more than it whitens. If no two vectors differ, it is the identity.

    Args:
        batches: the vectors, (n, D) at a time; rows of zeros are ignored.
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
    """Vectors (n, D), whitened by the result of `whitening_of`, each of length 1; rows of zeros stay zeros."""
    out = (vectors - whitening[0]) @ whitening[1:] * vectors.any(axis=1, keepdims=True)
    lengths = np.linalg.norm(out, axis=1, keepdims=True)
    return (out / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of two vectors of length 1, to three decimals."""
    return round(float(one @ other), 3)
