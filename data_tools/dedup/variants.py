"""The crops of a test image that are fingerprinted, so that cropped and mirrored copies are recognised.

A crop shifts everything that a perceptual hash looks at: a picture without 5 % of each side hashes like another one.
So the small side, the test sets, is hashed many times, and the large side only once.
"""

from typing import NamedTuple

import numpy as np

from data_tools.dedup.fingerprint import Box, Window

DEFAULT_LEVEL = 2
TRIMMED = "trimmed"
_SMALL = 128  # pixels; below, crops by whole pixels are too coarse
_LONG = 4096  # pixels of the longer side of an enlarged picture at most


class Crop(NamedTuple):
    """A part of a picture, by size and position."""

    scale: float  # fraction of either side
    down: float = 0.5  # its position, from 0 (top) to 1
    across: float = 0.5  # from 0 (left) to 1
    square: bool = False  # whether it is taken from the largest centred square instead of the whole picture

    @property
    def name(self) -> str:
        what = "square" if self.square else "whole"
        if self.scale == 1:
            return what
        at = "centre" if (self.down, self.across) == (0.5, 0.5) else f"{self.down:.2g}, {self.across:.2g}"
        return f"{what} {self.scale:.1%} at {at}"

    def window(self, height: int, width: int) -> Window:
        """The part of a picture of this size in pixels."""
        side = min(height, width)
        tall, wide = (side / height, side / width) if self.square else (1.0, 1.0)
        tall, wide = tall * self.scale, wide * self.scale
        return Window(self.down * (1 - tall), self.across * (1 - wide), tall, wide)


def _grid(scale: float, steps: int) -> list[Crop]:
    positions = [step / (steps - 1) for step in range(steps)]
    return [Crop(scale, down, across) for down in positions for across in positions]


_FIRST = [Crop(1), Crop(1, square=True), Crop(0.95), Crop(0.9)]
_SECOND = [Crop(0.85), Crop(0.8), Crop(0.975), Crop(0.875, square=True)]
_THIRD = [*_grid(0.95, 3), *_grid(0.9, 3), *_grid(0.85, 3), *_grid(0.8, 4)]
CROPS = tuple(dict.fromkeys([*_FIRST, *_SECOND, *_THIRD]))
LEVELS = (1, len(_FIRST), len(_FIRST) + len(_SECOND), len(CROPS))  # crops per level; mirrored, too: 2, 8, 16, 96


def crops_of(rgb: np.ndarray, level: int) -> tuple[np.ndarray, list[tuple[int, Box]]]:
    """The picture to crop, and the crops: each a number in `CROPS` and a box in pixels of that picture.

    It is the picture itself or, if that is small, an enlarged one. Crops that coincide are left out.
    """
    height, width, _ = rgb.shape
    factor = min(-(-_SMALL // min(height, width)), _LONG // max(height, width))
    if factor > 1 and level > 0:
        rgb = rgb.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width, _ = rgb.shape
    taken: dict[Box, int] = {}
    for number, crop in enumerate(CROPS[: LEVELS[level]]):
        taken.setdefault(_pixels(crop.window(height, width), height, width), number)
    return rgb, [(number, box) for box, number in taken.items()]


def variant_name(code: int) -> str:
    """A variant's name; its code is `2 * crop + mirrored`, where the crop after the last is the trimmed picture."""
    crop, mirrored = divmod(code, 2)
    name = TRIMMED if crop == len(CROPS) else CROPS[crop].name
    return f"{name}, mirrored" if mirrored else name


def window_of(code: int, height: int, width: int, trim: Box | None) -> Window:
    """The part of a test image that a variant shows; `trim` is the part within the image's border, if it has one."""
    crop = code // 2
    if crop < len(CROPS):
        return CROPS[crop].window(height, width)
    assert trim is not None
    return Window.of(trim, height, width)


def _pixels(window: Window, height: int, width: int) -> Box:
    box_height, box_width = max(1, round(window.height * height)), max(1, round(window.width * width))
    top = min(round(window.top * height), height - box_height)
    left = min(round(window.left * width), width - box_width)
    return Box(top, left, box_height, box_width)
