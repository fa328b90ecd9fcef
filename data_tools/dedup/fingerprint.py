"""The fingerprint by which an image is recognised: digest of its pixels, and perceptual hashes.

Hashes are computed from the brightness of a picture as a square of 64 x 64 pixels, whatever its shape: PDQ, 256 bits of
a picture's coarse structure, few of which change when it is edited.

That is Meta's algorithm ("The TMK+PDQF Video-Hashing Algorithm and the PDQ Image-Hashing Algorithm", 2019), from its
64 x 64 luma on: the 16 x 16 lowest frequencies of the luma's discrete cosine transform, without the constant, each
turned into a bit that says whether it is above their median. The bits equal those of Meta's code, even where rounding
decides them, as in drawings. The luma is computed in our own way, so hashes are comparable only with others from here.
"""

from typing import NamedTuple

import numpy as np
import xxhash

from data_tools.dedup.settings import FLAT
from vitscale.ground import native
from vitscale.ground.errors import MachineError

# Change this whenever the fingerprints change: only those of the same algorithm are comparable.
ALGORITHM = "pdq-64-1"
SIDE = 64
_LEAST = 0.5  # share of either side that must remain
HASH_BYTES = 32
_LOWEST = 16  # frequencies per axis


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


def pdq_hashes(lumas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of N pictures.

    Args:
        lumas: uint8 (N, 64, 64).

    Returns:
        hashes, uint8 (N, 32), packed bits; and qualities, uint8 (N,): 0 for a flat picture to 100 for one with enough
        contrast.
    """
    lumas, values = np.ascontiguousarray(lumas), np.zeros((len(lumas), _LOWEST * _LOWEST), np.float32)
    native.load().vitscale_lowest_frequencies(lumas.ctypes.data, len(lumas), _COSINES.ctypes.data, values.ctypes.data)
    lower_middle = values.shape[1] // 2 - 1
    median = np.partition(values, lower_middle, axis=1)[:, lower_middle]
    above = values > median[:, None]
    hashes = np.packbits(above[:, ::-1], axis=1)  # the highest frequency comes first
    return hashes, _qualities(lumas)


def _qualities(lumas: np.ndarray) -> np.ndarray:
    """Sums of the differences between neighbours, in whole hundredths of the range, scaled and cut off at 100."""
    pixels = lumas.astype(np.int16)
    total = np.zeros(len(pixels), np.int64)
    for axis in (1, 2):
        total += _HUNDREDTHS[np.abs(np.diff(pixels, axis=axis))].sum((1, 2))
    return np.minimum(total // 90, 100).astype(np.uint8)


def _cosines() -> np.ndarray:
    """float32 (16, 64): rows 1 to 16 of the orthonormal DCT-II, rounded as Meta's code does it."""
    frequency = np.arange(1, _LOWEST + 1)[:, None]
    position = 2 * np.arange(SIDE)[None] + 1
    return (np.float32(np.sqrt(2 / SIDE)) * np.cos(np.pi / (2 * SIDE) * frequency * position)).astype(np.float32)


_COSINES = _cosines()
_HUNDREDTHS = (np.arange(256, dtype=np.float32) * 100 / 255).astype(np.int64)


class Fingerprint(NamedTuple):
    """The fingerprint of one picture."""

    pixels: int  # XXH3-64 of the pixels, seeded by the width
    quality: int  # of the hash, 0 (flat) to 100
    pdq: bytes  # the hash, 32 bytes
    pdq_trimmed: bytes | None  # the hash without uniform borders; None if there are none, or nothing within them
    luma: np.ndarray  # that was hashed, uint8 (64, 64)
    luma_trimmed: np.ndarray | None  # likewise, without borders
    inside: Window | None  # the part of the picture within its borders; None if there are none


def fingerprint(rgb: np.ndarray) -> Fingerprint:
    """The fingerprint of a picture, uint8 (height, width, 3), as it is stored: upright, decoded, not cropped."""
    luma, luma_trimmed, box = lumas_of(rgb)
    hashes, qualities = pdq_hashes(np.stack([luma] if luma_trimmed is None else [luma, luma_trimmed]))
    is_empty = luma_trimmed is None or qualities[1] < FLAT
    return Fingerprint(
        pixels=pixels_digest(rgb),
        quality=int(qualities[0]),
        pdq=hashes[0].tobytes(),
        pdq_trimmed=None if is_empty else hashes[1].tobytes(),
        luma=luma,
        luma_trimmed=luma_trimmed,
        inside=None if box is None else Window.of(box, *rgb.shape[:2]),
    )


def lumas_of(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, Box | None]:
    """A picture's luma, its luma without uniform borders (or None), and the part of the picture within these."""
    box = trimmed(rgb)
    return square_luma(rgb), None if box is None else square_luma(rgb, box), box


def pixels_digest(rgb: np.ndarray) -> int:
    """XXH3-64 of the pixels, in [0, 2**64); seeded by the width, so that equal bytes of another shape differ."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rgb).data, rgb.shape[1])
