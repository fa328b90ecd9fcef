"""Augmentation: the box of each picture that is seen, and its flip, from (seed, epoch, uid) and the picture's size.

A box is (top, left, height, width) in pixels of the stored picture; the kernel resizes it to the model's input.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from vitscale import native
from vitscale.data.draws import uniform
from vitscale.data.hashing import combine, mix
from vitscale.images import Resize
from vitscale.recipe import Crop, EvalCrop

_CROP, _FLIP, _TOP, _LEFT, _VIEW = 3, 4, 6, 7, 27  # what a hash is for


def sample_keys(seed: int, epoch: int, uids: np.ndarray, views: np.ndarray | None = None) -> np.ndarray:
    """uint64 (B,): the key of every sample's randomness in one epoch, one a view; int64 uids (B,) and views (B,)."""
    keys = mix(mix(uids.astype(np.uint64)) ^ combine(seed, _CROP, epoch))
    if views is None:
        return keys
    return np.where(views == 0, keys, mix(keys ^ mix(mix(views.astype(np.uint64)) ^ combine(_VIEW))))


@dataclass(frozen=True)
class TrainTransform:
    """The paper's augmentation: a random crop (inception crop), and a horizontal flip with probability `flip`."""

    resize: ClassVar = Resize.AREA

    area: tuple[float, float] = (0.05, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4)."""
        return inception_crop(keys, heights, widths, self.area, self.aspect)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,)."""
        return uniform(keys, _FLIP) < self.flip


@dataclass(frozen=True)
class ResizeTransform:
    """BiT's augmentation: the picture as a square, of which a random part is seen, and a horizontal flip.

    `fraction` of each side is seen: 480 / 512, or 128 / 160 for small pictures (BiT-HyperRule; Kolesnikov et al. 2020).
    """

    resize: ClassVar = Resize.AREA

    fraction: float = 480 / 512
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4); every position of whole pixels is equally likely."""
        crop_heights, crop_widths = _part(heights, self.fraction), _part(widths, self.fraction)
        tops = (uniform(keys, _TOP) * (heights - crop_heights + 1)).astype(np.int64)
        lefts = (uniform(keys, _LEFT) * (widths - crop_widths + 1)).astype(np.int64)
        return np.stack([tops, lefts, crop_heights, crop_widths], axis=1).astype(np.int32)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,)."""
        return uniform(keys, _FLIP) < self.flip


@dataclass(frozen=True)
class EvalTransform:
    """A fixed view.

    `central` takes the square of `fraction` of the short side in the middle: with 224/256 what resizing the short side
    to 256 and cropping 224 shows. `square` takes `fraction` of each side and loses the aspect ratio: with 224/256 the
    few-shot evaluation's resize to 256 x 256 and crop, with 1 the whole picture. Before that `border` pixels are cut
    off each side (ObjectNet's pictures have a red frame of 2), fewer where a pixel would not be left. `resize` says how
    that becomes the model's input; kernels that reach beyond it see the picture there.
    """

    kind: Literal["central", "square"] = "central"
    fraction: float = 224 / 256
    border: int = 0
    resize: Resize = Resize.AREA

    @classmethod
    def of(cls, crop: EvalCrop, border: int = 0) -> "EvalTransform":
        """What a recipe asks for."""
        return cls(crop.kind, crop.fraction, border, Resize[crop.resize.upper()])

    def __post_init__(self) -> None:
        assert 0 < self.fraction <= 1 and self.border >= 0, (self.fraction, self.border)

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """int32 (B, 4); the keys play no part."""
        above, beside = (np.minimum(self.border, (sides - 1) // 2) for sides in (heights, widths))
        heights, widths = heights - 2 * above, widths - 2 * beside
        if self.kind == "central":
            crop_height = crop_width = _part(np.minimum(heights, widths), self.fraction)
        else:
            crop_height, crop_width = _part(heights, self.fraction), _part(widths, self.fraction)
        tops, lefts = (heights - crop_height) // 2, (widths - crop_width) // 2
        return np.stack([tops + above, lefts + beside, crop_height, crop_width], axis=1).astype(np.int32)

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
    keys = np.ascontiguousarray(keys, np.uint64)
    heights, widths = np.ascontiguousarray(heights, np.int64), np.ascontiguousarray(widths, np.int64)
    assert keys.shape == heights.shape == widths.shape == (len(boxes),)
    addresses = (column.ctypes.data for column in (keys, heights, widths))
    native.load().vitscale_inception_crop(len(boxes), *addresses, *area, *aspect, boxes.ctypes.data)
    return boxes
