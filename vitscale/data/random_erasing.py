"""Random erasing on the device: in some images a rectangle becomes noise or the mean colour."""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitscale import recipe
from vitscale.data.draws import between, between_ratios, combine, normal_quantiles, uniform
from vitscale.data.image_operations import ImageOperation

_DONE, _AREA, _ASPECT, _TOP, _LEFT, _NOISE = range(6)  # purposes of draws
_ATTEMPTS = 10
_GOLDEN, _FIRST, _SECOND = (
    int(np.uint64(each).astype(np.int64)) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class RandomErasing(ImageOperation):
    """Random erasing as in timm with one rectangle an image, except that the noise comes from each sample's key.

    Each noise value is one of 65,536 quantiles of a normal distribution, the same on every device.
    """

    def __init__(self, block: recipe.RandomErasing) -> None:
        self._block = block
        self._quantiles = torch.from_numpy(normal_quantiles().astype(np.float32)) if block.mode == "pixel" else None

    @classmethod
    def of(cls, block: recipe.RandomErasing) -> Self:
        """See `ImageOperation.of`."""
        return cls(block)

    def __call__(self, images: Tensor, keys: np.ndarray) -> Tensor:
        """See `ImageOperation.__call__`."""
        side = images.shape[1]
        rectangles = self.rectangles(keys, side)
        erased = images.clone()
        noise_keys = (keys ^ combine(_NOISE)).view(np.int64)
        for row in np.flatnonzero(rectangles[2]):
            top, left, height, width = rectangles[:, row].tolist()
            part = erased[row, top : top + height, left : left + width]
            if self._block.mode == "pixel":
                part.copy_(self._noise(int(noise_keys[row]), height, width, images.device))
            else:
                part.zero_()
        return erased

    def rectangles(self, keys: np.ndarray, side: int) -> np.ndarray:
        """What to erase in images of `side` pixels with these keys, uint64 (B,).

        Tops, lefts, heights and widths in pixels, int64 (4, B); a height of 0 means that nothing is erased.
        """
        block = self._block
        rectangles = np.zeros((4, len(keys)), np.int64)
        is_open = uniform(keys, _DONE) < block.probability
        for attempt in range(_ATTEMPTS):
            areas = between(block.area, uniform(keys, attempt, _AREA)) * side**2
            aspects = between_ratios(block.aspect, uniform(keys, attempt, _ASPECT))
            heights, widths = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
            fits = is_open & (heights < side) & (widths < side) & (heights > 0) & (widths > 0)
            tops = np.floor(uniform(keys, attempt, _TOP) * (side - heights + 1))
            lefts = np.floor(uniform(keys, attempt, _LEFT) * (side - widths + 1))
            rectangles[:, fits] = np.stack([tops, lefts, heights, widths])[:, fits]
            is_open &= ~fits
        return rectangles

    def _noise(self, key: int, height: int, width: int, device: torch.device) -> Tensor:
        assert self._quantiles is not None, "of mode pixel"
        self._quantiles = self._quantiles.to(device)
        counters = torch.arange(height * width * 3, device=device)
        return self._quantiles[_mixed(counters * _GOLDEN + key) >> 48 & 0xFFFF].view(height, width, 3)


def _mixed(values: Tensor) -> Tensor:
    """`draws.mix` on int64 of the same bits. Products wrap around; shifts copy the sign bit, so it is masked out."""
    z = values + _GOLDEN
    z = (z ^ (z >> 30 & 2**34 - 1)) * _FIRST
    z = (z ^ (z >> 27 & 2**37 - 1)) * _SECOND
    return z ^ (z >> 31 & 2**33 - 1)
