"""Augmentation: each picture's crop box and flip, as functions of (seed, epoch, uid) and the picture's size.

A box is (top, left, height, width) in pixels of the stored picture; the kernel resizes it to the model's input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitscale.data.draws import Purpose, between, between_ratios, combine, mix, uniform
from vitscale.ground import native
from vitscale.ground.images import OK, Resize, decode_slice
from vitscale.recipe import Crop, EvalCrop

_ATTEMPTS = 10  # torchvision's


def sample_keys(seed: int, epoch: int, uids: np.ndarray, views: np.ndarray | None = None) -> np.ndarray:
    """The key of each sample's randomness in one epoch (from 0), uint64 (B,), by the samples' uids, int64 (B,).

    `views` tells which view of its sample each row is, int64 (B,), from 0; each view has a key of its own. None means
    that all are view 0.
    """
    keys = mix(mix(uids.astype(np.uint64)) ^ combine(seed, Purpose.CROP, epoch))
    if views is None:
        return keys
    return np.where(views == 0, keys, mix(keys ^ mix(mix(views.astype(np.uint64)) ^ combine(Purpose.VIEW))))


@dataclass(frozen=True)
class TrainTransform:
    """The paper's augmentation: a random crop (inception crop), and a horizontal flip with probability `flip`."""

    resize: ClassVar = Resize.AREA

    area: tuple[float, ...] = (0.05, 1.0)
    aspect: tuple[float, ...] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Random boxes, int32 (B, 4), drawn as TensorFlow's `sample_distorted_bounding_box`, which the paper used.

        The aspect ratio width / height is uniform in `aspect`. The height is uniform among the whole numbers that give
        the box a share of the picture's area within `area`. The position is uniform (TensorFlow never draws the last
        position of each axis; we do). After 100 draws that do not fit, the box is the whole picture.
        """
        boxes = np.empty((len(keys), 4), np.int32)
        columns = [np.ascontiguousarray(keys, np.uint64)]
        columns += [np.ascontiguousarray(sides, np.int64) for sides in (heights, widths)]
        assert all(column.shape == (len(boxes),) for column in columns)
        addresses = (column.ctypes.data for column in columns)
        native.load().vitscale_inception_crop(len(boxes), *addresses, *self.area, *self.aspect, boxes.ctypes.data)
        return boxes

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """Which pictures are flipped, bool (B,)."""
        return uniform(keys, Purpose.FLIP) < self.flip


@dataclass(frozen=True)
class ResizeTransform:
    """BiT's augmentation: the picture resized to a square, a random crop of that, and a horizontal flip.

    The crop keeps `fraction` of each side: 480 / 512, or 128 / 160 for small pictures (BiT-HyperRule; Kolesnikov et al.
    2020).
    """

    resize: ClassVar = Resize.AREA

    fraction: float = 480 / 512
    flip: float = 0.5

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Crop boxes, int32 (B, 4); every position in whole pixels is equally likely."""
        crop_heights, crop_widths = _part(heights, self.fraction), _part(widths, self.fraction)
        tops = (uniform(keys, Purpose.TOP) * (heights - crop_heights + 1)).astype(np.int64)
        lefts = (uniform(keys, Purpose.LEFT) * (widths - crop_widths + 1)).astype(np.int64)
        return np.stack([tops, lefts, crop_heights, crop_widths], axis=1).astype(np.int32)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """Which pictures are flipped, bool (B,)."""
        return uniform(keys, Purpose.FLIP) < self.flip


@dataclass(frozen=True)
class ResizedTransform(TrainTransform):
    """torchvision's RandomResizedCrop, resized as Pillow's antialiased bicubic, and a horizontal flip.

    It is what self-supervision's published results use. Its boxes are no inception crop: areas are uniform, aspects
    uniform in the logarithm.
    """

    resize: ClassVar = Resize.PIL_BICUBIC

    area: tuple[float, ...] = (0.08, 1.0)

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Random boxes, int32 (B, 4): the first of ten draws that fits, else the largest central one in `aspect`."""
        boxes = self._largest(heights, widths)
        left = np.arange(len(keys))  # rows that have no box yet
        for attempt in range(_ATTEMPTS):
            if not len(left):
                break
            drawn = [uniform(keys[left], Purpose.RESIZED, attempt, number) for number in range(4)]
            height, width = heights[left], widths[left]
            area = height * width * between(self.area, drawn[0])
            aspect = between_ratios(self.aspect, drawn[1])
            w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
            tops, lefts = np.floor(drawn[2] * (height - h + 1)), np.floor(drawn[3] * (width - w + 1))
            fits = (w > 0) & (h > 0) & (w <= width) & (h <= height)
            boxes[left[fits]] = np.stack([tops, lefts, h, w], axis=1)[fits]
            left = left[~fits]
        return boxes

    def _largest(self, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        aspect = np.clip(widths / heights, self.aspect[0], self.aspect[1])
        h = np.where(widths / heights < aspect, np.rint(widths / aspect), heights)
        w = np.where(widths / heights > aspect, np.rint(heights * aspect), widths)
        h, w = np.maximum(h, 1), np.maximum(w, 1)
        return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1).astype(np.int32)


@dataclass(frozen=True)
class EvalTransform:
    """Evaluation's fixed crop from the middle of a picture, without a flip.

    `central` takes the square in the middle whose side is `fraction` of the short side: 224/256 shows the same as
    resizing the short side to 256 and cropping 224. `square` takes `fraction` of each side and loses the aspect ratio:
    224/256 is the few-shot evaluation's resize to 256 x 256 and crop, 1 is the whole picture. Before that, `border`
    pixels are cut off each side (ObjectNet's pictures have a red frame of 2), fewer if no pixel would be left. `resize`
    is the filter that resizes the crop to the model's input; where it reaches beyond the crop, it sees the picture.
    """

    kind: Literal["central", "square"] = "central"
    fraction: float = 224 / 256
    border: int = 0
    resize: Resize = Resize.AREA

    @classmethod
    def of(cls, crop: EvalCrop, border: int = 0) -> "EvalTransform":
        """The transform that a recipe's crop describes."""
        return cls(crop.kind, crop.fraction, border, Resize[crop.resize.upper()])

    def __post_init__(self) -> None:
        assert 0 < self.fraction <= 1 and self.border >= 0, (self.fraction, self.border)

    def boxes(self, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Crop boxes, int32 (B, 4), whatever the keys."""
        above, beside = (np.minimum(self.border, (sides - 1) // 2) for sides in (heights, widths))
        heights, widths = heights - 2 * above, widths - 2 * beside
        if self.kind == "central":
            crop_height = crop_width = _part(np.minimum(heights, widths), self.fraction)
        else:
            crop_height, crop_width = _part(heights, self.fraction), _part(widths, self.fraction)
        tops, lefts = (heights - crop_height) // 2, (widths - crop_width) // 2
        return np.stack([tops + above, lefts + beside, crop_height, crop_width], axis=1).astype(np.int32)

    def flips(self, keys: np.ndarray) -> np.ndarray:
        """bool (B,), all False: evaluation flips nothing."""
        return np.zeros(len(keys), bool)


Transform = TrainTransform | ResizeTransform | EvalTransform


def train_transform(crop: Crop, flip: float) -> TrainTransform | ResizeTransform:
    """The training transform that a recipe's crop and flip probability describe."""
    match crop.kind:
        case "resize":
            return ResizeTransform(crop.fraction, flip)
        case "resized":
            return ResizedTransform(tuple(crop.area), tuple(crop.aspect), flip)
    return TrainTransform(tuple(crop.area), tuple(crop.aspect), flip)


def _part(sides: np.ndarray, fraction: float) -> np.ndarray:
    return np.maximum(1, np.rint(sides * fraction).astype(np.int64))


def views_of(
    pictures: Sequence[tuple[bytes, int, int]], transform: EvalTransform, image_size: int, *, are_raw: bool = False
) -> Tensor:
    """Pictures that are in no shard, as evaluation would see them from one, uint8 (B, S, S, 3) with S = `image_size`.

    `pictures` are (bytes, height, width in pixels) of each JPEG, which the caller has found to decode, or, if they
    `are_raw`, of its pixels, uint8 (height, width, 3).
    """
    count = len(pictures)
    keys = np.zeros(count, np.uint64)
    sizes, heights, widths = np.array([(len(content), *size) for content, *size in pictures], np.int64).T
    out, status = np.empty((count, image_size, image_size, 3), np.uint8), np.full(count, OK, np.int32)
    decode_slice(
        np.frombuffer(b"".join(content for content, _, _ in pictures), np.uint8),
        np.cumsum(sizes) - sizes,
        sizes,
        np.zeros(count, np.uint32),
        np.zeros(count, bool),
        np.full(count, are_raw),
        heights,
        widths,
        transform.boxes(keys, heights, widths)[:, None],
        transform.flips(keys)[:, None],
        False,
        [out[:, None]],
        [transform.resize],
        status,
    )
    assert (status == OK).all(), f"statuses {status.tolist()} of pictures that were found good"
    return torch.from_numpy(out)
