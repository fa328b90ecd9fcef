"""Augmentation: the box of each picture that is seen, and its flip, from (seed, epoch, uid) and the picture's size.

A box is (top, left, height, width) in pixels of the stored picture; the kernel resizes it to the model's input.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from vitscale.data.hashing import combine, mix
from vitscale.recipe import Crop

_ATTEMPTS = 100
_CROP, _FLIP, _TOP, _LEFT = 3, 4, 6, 7  # what a hash is for


def sample_keys(seed: int, epoch: int, uids: np.ndarray) -> np.ndarray:
    """uint64 (B,): the key of every sample's randomness in one epoch; int64 uids (B,)."""
    return mix(mix(uids.astype(np.uint64)) ^ combine(seed, _CROP, epoch))


@dataclass(frozen=True)
class TrainTransform:
    """The paper's augmentation: a random crop (inception crop), and a horizontal flip with probability `flip`."""

    area: tuple[float, float] = (0.05, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4)."""
        return inception_crop(keys, heights, widths, self.area, self.aspect)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,)."""
        return _uniform(keys, _FLIP) < self.flip


@dataclass(frozen=True)
class ResizeTransform:
    """BiT's augmentation: the picture as a square, of which a random part is seen, and a horizontal flip.

    `fraction` of each side is seen: 480 / 512, or 128 / 160 for small pictures (BiT-HyperRule; Kolesnikov et al. 2020).
    """

    fraction: float = 480 / 512
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4); every position of whole pixels is equally likely."""
        crop_heights, crop_widths = _part(heights, self.fraction), _part(widths, self.fraction)
        tops = (_uniform(keys, _TOP) * (heights - crop_heights + 1)).astype(np.int64)
        lefts = (_uniform(keys, _LEFT) * (widths - crop_widths + 1)).astype(np.int64)
        return np.stack([tops, lefts, crop_heights, crop_widths], axis=1).astype(np.int32)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,)."""
        return _uniform(keys, _FLIP) < self.flip


@dataclass(frozen=True)
class EvalTransform:
    """A fixed view.

    `central` takes the square of `fraction` of the short side in the middle: with 224/256 what resizing the short side
    to 256 and cropping 224 shows. `square` takes `fraction` of each side and loses the aspect ratio: with 224/256 the
    few-shot evaluation's resize to 256 x 256 and crop, with 1 the whole picture.
    """

    kind: Literal["central", "square"] = "central"
    fraction: float = 224 / 256

    def __post_init__(self) -> None:
        assert 0 < self.fraction <= 1, self.fraction

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4); the keys play no part."""
        if self.kind == "central":
            crop_height = crop_width = _part(np.minimum(heights, widths), self.fraction)
        else:
            crop_height, crop_width = _part(heights, self.fraction), _part(widths, self.fraction)
        tops, lefts = (heights - crop_height) // 2, (widths - crop_width) // 2
        return np.stack([tops, lefts, crop_height, crop_width], axis=1).astype(np.int32)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,): none."""
        return np.zeros(len(keys), bool)


Transform = TrainTransform | ResizeTransform | EvalTransform


def train_transform(crop: Crop, flip: float) -> TrainTransform | ResizeTransform:
    """What a recipe asks for."""
    if crop.kind == "resize":
        return ResizeTransform(crop.fraction, flip)
    (area_low, area_high), (aspect_low, aspect_high) = crop.area, crop.aspect
    return TrainTransform((area_low, area_high), (aspect_low, aspect_high), flip)


def _uniform(keys: np.ndarray, purpose: int) -> np.ndarray:
    """Uniform in [0, 1), float64 (B,)."""
    return (mix(keys ^ combine(purpose)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _part(sides: np.ndarray, fraction: float) -> np.ndarray:
    return np.maximum(1, np.rint(sides * fraction).astype(np.int64))


def inception_crop(
    keys: np.ndarray,
    heights: np.ndarray,
    widths: np.ndarray,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> np.ndarray:
    """Random boxes (B, 4) int32 as TensorFlow's `sample_distorted_bounding_box` draws them, as the paper used it.

    The aspect ratio width / height is uniform in `aspect`; the height is uniform among the whole numbers whose area,
    as part of the picture's, lies in `area`; the position is uniform (TensorFlow never draws the last one of each
    axis; we do). After 100 draws that do not fit, the whole picture.
    """
    boxes = np.empty((len(keys), 4), np.int32)
    _inception_crop(
        keys, heights.astype(np.int64), widths.astype(np.int64), area[0], area[1], aspect[0], aspect[1], boxes
    )
    return boxes


@njit(nogil=True, cache=True)
def _draw(key, counter):
    """Uniform in [0, 1): draw number `counter` of the sample with this key."""
    z = key + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@njit(nogil=True, cache=True)
def _inception_crop(keys, heights, widths, min_area, max_area, min_aspect, max_aspect, boxes):
    for b in range(len(keys)):
        height, width = heights[b], widths[b]
        boxes[b, 0], boxes[b, 1], boxes[b, 2], boxes[b, 3] = 0, 0, height, width
        low, high = min_area * height * width, max_area * height * width
        for attempt in range(_ATTEMPTS):
            counter = np.uint64(4 * attempt)
            aspect = min_aspect + (max_aspect - min_aspect) * _draw(keys[b], counter)
            shortest = int(np.rint(np.sqrt(low / aspect)))
            tallest = min(int(np.rint(np.sqrt(high / aspect))), height)
            while tallest > 0 and int(np.rint(tallest * aspect)) > width:
                tallest -= 1
            shortest = min(shortest, tallest)
            h = shortest + int(_draw(keys[b], counter + np.uint64(1)) * (tallest - shortest + 1))
            w = int(np.rint(h * aspect))
            # Rounding to whole pixels can leave the range by a row.
            if h * w < low:
                h += 1
                w = int(np.rint(h * aspect))
            elif h * w > high:
                h -= 1
                w = int(np.rint(h * aspect))
            if h < 1 or w < 1 or h > height or w > width or h * w < low or h * w > high:
                continue
            boxes[b, 0] = int(_draw(keys[b], counter + np.uint64(2)) * (height - h + 1))
            boxes[b, 1] = int(_draw(keys[b], counter + np.uint64(3)) * (width - w + 1))
            boxes[b, 2], boxes[b, 3] = h, w
            break
