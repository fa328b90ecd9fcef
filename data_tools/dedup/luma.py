"""The brightness of a picture as a square of 64 x 64 pixels, whatever its shape; fingerprints are computed from it."""

from typing import NamedTuple

import numpy as np

from vitscale.ground import native
from vitscale.ground.errors import MachineError

SIDE = 64

_LEAST = 0.5  # share of either side that must remain


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Window(NamedTuple):
    """A part of a picture, in fractions of its height and width."""

    top: float
    left: float
    height: float
    width: float

    @classmethod
    def of(cls, box: Box, height: int, width: int) -> "Window":
        """A box of a picture of this size in pixels, as fractions."""
        return cls(box.top / height, box.left / width, box.height / height, box.width / width)


def square_luma(rgb: np.ndarray, box: Box | None = None) -> np.ndarray:
    """Brightness of a picture of any size, or of a part of it; each pixel is the mean of the area that it covers.

    Args:
        rgb: uint8 (height, width, 3).
        box: the part to use; the whole picture by default.

    Returns uint8 (64, 64), by ITU-R BT.601 (0.299 R + 0.587 G + 0.114 B).
    In integers: the same on every processor.
    """
    height, width, _ = rgb.shape
    rgb, luma = np.ascontiguousarray(rgb), np.empty((SIDE, SIDE), np.uint8)
    part = np.array(box or (0, 0, height, width), np.int64)
    if native.load().vitscale_square_luma(rgb.ctypes.data, width, part.ctypes.data, luma.ctypes.data):
        raise MachineError(f"no memory for the brightness of a picture of {width} x {height} pixels")
    return luma


def trimmed(rgb: np.ndarray) -> Box | None:
    """The part of a picture within its uniform borders; None if it has none, or hardly anything would remain."""
    rgb, part = np.ascontiguousarray(rgb), np.empty(4, np.int64)
    native.load().vitscale_without_borders(rgb.ctypes.data, *rgb.shape[:2], part.ctypes.data)
    box = Box(*part.tolist())
    is_whole = (box.height, box.width) == rgb.shape[:2]
    return None if is_whole or box.height < _LEAST * rgb.shape[0] or box.width < _LEAST * rgb.shape[1] else box
