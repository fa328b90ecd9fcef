"""Correlation of two pictures, after finding the part of one that the other shows.

Near hashes say that one picture may be a crop of the other, and roughly which crop. From there, the window in the test
image is moved, scaled and turned a little until the query fits best (Gauss-Newton on the squared difference, with
brightness and contrast free; Baker and Matthews, "Lucas-Kanade 20 Years On", 2004). Copies then correlate above 0.95.
Without this, a crop that is 2 % off reaches 0.8, and so do two different shirts on a white ground.

Uniform borders are left out: two pale pictures in one kind of frame correlate by their frames.
"""

import numpy as np

from data_tools.dedup.luma import SIDE, Window
from vitscale.ground import native

_GRID = 32  # pixels per side that are compared
_MARGIN = 1.0  # pixels of 64 beside a border that are left out too, because it bleeds into them


def correlation(
    query: np.ndarray,
    image: np.ndarray,
    window: Window,
    *,
    mirrored: bool,
    inside_query: Window | None = None,
    inside_image: Window | None = None,
) -> float:
    """The correlation of a query with a window of a test image, or with the best-fitting window near it.

    Args:
        query, image: uint8 (64, 64), lumas of the whole pictures.
        window: the part of the image that the query is thought to show.
        mirrored: whether the query shows it mirrored.
        inside_query, inside_image: the part of each picture within its borders; None if it has no border.

    Returns Pearson's correlation of the pixels, -1 to 1, three decimals; 0 where there is no contrast, or hardly
    anything but border.
    """
    width = -window.width if mirrored else window.width
    start = np.array(
        [
            *((window.top + window.height / 2) * SIDE - 0.5, 0.0, window.height * SIDE),
            *((window.left + window.width / 2) * SIDE - 0.5, width * SIDE, 0.0),
        ],
        np.float32,
    )
    seen = _pixels(inside_query, _GRID) if inside_query is not None else _ALL
    box = _pixels(inside_image, SIDE) if inside_image is not None else _ALL
    arrays = np.ascontiguousarray(query), np.ascontiguousarray(image), start, seen, box
    return round(native.load().vitscale_aligned(*(array.ctypes.data for array in arrays)), 3)


_ALL = np.array([-np.inf, -np.inf, np.inf, np.inf], np.float32)


def _pixels(inside: Window, side: int) -> np.ndarray:
    """float32 (4,): the pixel positions that enclose the part within the borders: top, left, bottom, right."""
    margin = _MARGIN * side / SIDE
    top, left = inside.top * side, inside.left * side
    bottom, right = top + inside.height * side, left + inside.width * side
    # A picture's own edge needs no margin.
    return np.array(
        [
            top + margin - 0.5 if inside.top > 0 else -np.inf,
            left + margin - 0.5 if inside.left > 0 else -np.inf,
            bottom - margin - 0.5 if bottom < side else np.inf,
            right - margin - 0.5 if right < side else np.inf,
        ],
        np.float32,
    )
