"""What solarizes images."""

from typing import Self

import numpy as np
import torch
from torch import Tensor

import example_vision
from vitscale.data.image_operations import ImageOperation


class Solarize(ImageOperation):
    """Inverts the bright pixels of some images: which ones is decided by their keys."""

    def __init__(self, share: float, threshold: int) -> None:
        self._share, self._threshold = share, threshold

    @classmethod
    def of(cls, block: example_vision.Solarize) -> Self:
        return cls(block.share, block.threshold)

    def __call__(self, images: Tensor, keys: np.ndarray) -> Tensor:
        chosen = torch.from_numpy(keys * 2.0**-64 < self._share).to(images.device)[:, None, None, None]
        return torch.where(chosen & (images >= self._threshold), 255 - images, images)
