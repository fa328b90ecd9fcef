"""What a JPEG says of itself, for compiled code; no decoder is needed."""

import numpy as np
from numba import njit

_LEAST_BYTES = 11  # two of the start, nine up to the width in a frame header that follows at once


@njit(nogil=True, cache=True)
def has_size(stored, start, size, height, width):
    """Whether `stored[start : start + size]` is a JPEG of this height and width in pixels by its own frame header.

    A checksum covers the stored bytes alone. Asked for another size than the picture has, the decoder scales it or
    fills a part of the memory, and reports success: the rest would be another sample's pixels.
    """
    if size < _LEAST_BYTES or stored[start] != 0xFF or stored[start + 1] != 0xD8:
        return False
    at, end = start + 2, start + size
    while at + 9 <= end and stored[at] == 0xFF:
        marker = stored[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            found_height = (np.int64(stored[at + 5]) << 8) | np.int64(stored[at + 6])
            found_width = (np.int64(stored[at + 7]) << 8) | np.int64(stored[at + 8])
            return found_height == height and found_width == width
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # these have no length; the decoder passes over them
            at += 2
        else:
            at += 2 + ((np.int64(stored[at + 2]) << 8) | np.int64(stored[at + 3]))
    return False
