"""PDQ, the perceptual hash: 256 bits of a picture's coarse structure, few of which change when the picture is edited.

Meta's algorithm ("The TMK+PDQF Video-Hashing Algorithm and the PDQ Image-Hashing Algorithm", 2019), from its 64 x 64
luma on: of the luma's discrete cosine transform, the 16 x 16 lowest frequencies without the constant, each turned into
a bit that says whether it is above their median. The library `pdqhash` computes it where it is installed, and NumPy
elsewhere, to the same bits. How the luma comes about is ours (`luma.py`): hashes are comparable only with such.
"""

import numpy as np

from data_tools.dedup.luma import SIDE

try:
    import pdqhash
except ImportError:  # an extra of vitscale: dedup
    pdqhash = None

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
    if pdqhash is None:
        return numpy_pdq_hashes(lumas)
    hashes = np.empty((len(lumas), HASH_BYTES), np.uint8)
    qualities = np.empty(len(lumas), np.uint8)
    for i, luma in enumerate(lumas):
        bits, qualities[i] = pdqhash.compute(np.repeat(luma[:, :, None], 3, axis=2))
        hashes[i] = np.packbits(bits.astype(np.uint8))
    return hashes, qualities


def numpy_pdq_hashes(lumas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`pdq_hashes` without the library: the same bits, even where rounding decides them, as in drawings."""
    pixels = lumas.astype(np.float32)
    # Summed in the order in which Meta's code does it: a product of matrices would round otherwise.
    rows = np.zeros((len(lumas), _SIDE, SIDE), np.float32)
    for i in range(SIDE):
        rows += _COSINES[:, i, None] * pixels[:, None, i]
    transformed = np.zeros((len(lumas), _SIDE, _SIDE), np.float32)
    for i in range(SIDE):
        transformed += rows[:, :, i, None] * _COSINES[:, i]
    values = transformed.reshape(len(lumas), _SIDE * _SIDE)
    lower_middle = values.shape[1] // 2 - 1
    median = np.partition(values, lower_middle, axis=1)[:, lower_middle]
    above = values > median[:, None]
    hashes = np.packbits(above[:, ::-1], axis=1)  # the highest frequency comes first
    return hashes, _qualities(pixels)


def _qualities(pixels: np.ndarray) -> np.ndarray:
    """Sums of the differences between neighbours, in whole hundredths of the range, scaled and cut off at 100."""
    total = np.zeros(len(pixels), np.int64)
    for axis in (1, 2):
        steps = (np.diff(pixels, axis=axis) * 100 / 255).astype(np.int64)
        total += np.abs(steps).sum((1, 2))
    return np.minimum(total // 90, 100).astype(np.uint8)


def _cosines() -> np.ndarray:
    """float32 (16, 64): rows 1 to 16 of the orthonormal DCT-II, rounded as Meta's code does it."""
    frequency = np.arange(1, _SIDE + 1)[:, None]
    position = 2 * np.arange(SIDE)[None] + 1
    return (np.float32(np.sqrt(2 / SIDE)) * np.cos(np.pi / (2 * SIDE) * frequency * position)).astype(np.float32)


_COSINES = _cosines()
