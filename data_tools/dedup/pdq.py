"""PDQ, the perceptual hash: 256 bits of a picture's coarse structure, few of which change when the picture is edited.

Meta's algorithm ("The TMK+PDQF Video-Hashing Algorithm and the PDQ Image-Hashing Algorithm", 2019), from its 64 x 64
luma on: the 16 x 16 lowest frequencies of the luma's discrete cosine transform, without the constant, each turned into
a bit that says whether it is above their median. The bits equal those of Meta's code, even where rounding decides them,
as in drawings. The luma is computed in our own way (`luma.py`), so hashes are comparable only with others from it.
"""

import numpy as np

from data_tools.dedup.luma import SIDE
from vitscale.ground import native

HASH_BYTES = 32
_SIDE = 16


def pdq_hashes(lumas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of N pictures.

    Args:
        lumas: uint8 (N, 64, 64).

    Returns:
        hashes, uint8 (N, 32), packed bits; and qualities, uint8 (N,): 0 for a flat picture to 100 for one with enough
        contrast.
    """
    lumas, values = np.ascontiguousarray(lumas), np.zeros((len(lumas), _SIDE * _SIDE), np.float32)
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
    frequency = np.arange(1, _SIDE + 1)[:, None]
    position = 2 * np.arange(SIDE)[None] + 1
    return (np.float32(np.sqrt(2 / SIDE)) * np.cos(np.pi / (2 * SIDE) * frequency * position)).astype(np.float32)


_COSINES = _cosines()
_HUNDREDTHS = (np.arange(256, dtype=np.float32) * 100 / 255).astype(np.int64)
