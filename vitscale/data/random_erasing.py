"""Random erasing on the device: in some images a rectangle becomes noise, or the mean colour."""

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vitscale import recipe
from vitscale.data.draws import between, between_ratios, normal_quantiles, uniform
from vitscale.data.hashing import combine
from vitscale.data.image_operations import ImageOperation

_DONE, _AREA, _ASPECT, _TOP, _LEFT, _NOISE = range(6)  # what a draw is for
_ATTEMPTS = 10
_GOLDEN, _FIRST, _SECOND = (
    int(np.uint64(each).astype(np.int64)) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Rectangles(NamedTuple):
    """Of each image in pixels, int64 (B,); images that stay as they are have a height of 0."""

    tops: np.ndarray
    lefts: np.ndarray
    heights: np.ndarray
    widths: np.ndarray


class RandomErasing(ImageOperation):
    """As timm's with one rectangle an image, but for the bits of its noise, which come from each sample's key.

    Noise is one of 65,536 values of a normal distribution, the same on every device.
    """

    def __init__(self, block: recipe.RandomErasing) -> None:
        self._block = block
        self._quantiles = torch.from_numpy(normal_quantiles().astype(np.float32)) if block.mode == "pixel" else None

    @classmethod
    def of(cls, block: recipe.RandomErasing) -> Self:
        """As `ImageOperation.of`."""
        return cls(block)

    def __call__(self, images: Tensor, keys: np.ndarray) -> Tensor:
        """As `ImageOperation.__call__`."""
        side = images.shape[1]
        found = self.rectangles(keys, side)
        erased = images.clone()
        noise_keys = (keys ^ combine(_NOISE)).view(np.int64)
        for row in np.flatnonzero(found.heights):
            top, left, height, width = (int(each[row]) for each in found)
            part = erased[row, top : top + height, left : left + width]
            if self._block.mode == "pixel":
                part.copy_(self._noise(int(noise_keys[row]), height, width, images.device))
            else:
                part.zero_()
        return erased

    def rectangles(self, keys: np.ndarray, side: int) -> Rectangles:
        """Where images of `side` pixels are erased, by their keys, uint64 (B,)."""
        block = self._block
        found = Rectangles(*np.zeros((4, len(keys)), np.int64))
        is_open = uniform(keys, _DONE) < block.probability
        for attempt in range(_ATTEMPTS):
            areas = between(block.area, uniform(keys, attempt, _AREA)) * side**2
            aspects = between_ratios(block.aspect, uniform(keys, attempt, _ASPECT))
            heights, widths = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
            fits = is_open & (heights < side) & (widths < side) & (heights > 0) & (widths > 0)
            tops = np.floor(uniform(keys, attempt, _TOP) * (side - heights + 1))
            lefts = np.floor(uniform(keys, attempt, _LEFT) * (side - widths + 1))
            for all_of_them, drawn in zip(found, (tops, lefts, heights, widths), strict=True):
                all_of_them[fits] = drawn[fits]
            is_open &= ~fits
        return found

    def _noise(self, key: int, height: int, width: int, device: torch.device) -> Tensor:
        assert self._quantiles is not None, "of mode pixel"
        self._quantiles = self._quantiles.to(device)
        counters = torch.arange(height * width * 3, device=device)
        return self._quantiles[_mixed(counters * _GOLDEN + key) >> 48 & 0xFFFF].view(height, width, 3)


def _mixed(values: Tensor) -> Tensor:
    """`hashing.mix` on the same bits as int64, whose products wrap around; shifts keep the sign, and it is masked."""
    z = values + _GOLDEN
    z = (z ^ (z >> 30 & 2**34 - 1)) * _FIRST
    z = (z ^ (z >> 27 & 2**37 - 1)) * _SECOND
    return z ^ (z >> 31 & 2**33 - 1)
