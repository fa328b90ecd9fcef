"""The compiled heart of the loader: stored bytes -> checked, decoded, cropped, resized, flipped pixels.

One thread works on one slice at a time; Python threads call it side by side, so no threading layer of numba's plays a
part. Resizing is OpenCV's INTER_AREA, as FFCV has it (the paper's pipeline: bilinear without antialiasing).
"""

import numpy as np
from numba import njit

from vitscale.shards import crc32c
from vitscale.shards.jpeg import c_resize, decode_into

OK, CRC_MISMATCH, DECODER_REFUSED, SIZE_MISMATCH = 0, 1, 2, 3


@njit(nogil=True, cache=True)
def has_size(stored, start, size, height, width):
    """Whether the JPEG in `stored[start : start + size]` has this height and width in pixels by its own frame header.

    The checksum covers the stored bytes alone. Asked for another size than the picture has, the decoder scales it or
    fills a part of the scratch memory, and reports success: the rest would be another sample's pixels.
    """
    at, end = start + 2, start + size  # after the marker that starts every JPEG
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


@njit(nogil=True, cache=True)
def decode_slice(stored, starts, sizes, crcs, heights, widths, boxes, flips, scratch, out, status):
    """Fill `out` and `status` for B samples.

    Args:
        stored: uint8, the samples' stored bytes, sample b at [starts[b], starts[b] + sizes[b]).
        crcs: uint32 (B,), CRC-32C of each sample's stored bytes.
        heights, widths: int64 (B,), size of the stored picture.
        boxes: int32 (B, 4), top, left, height, width of what is seen.
        flips: bool (B,).
        scratch: uint8, room for the largest of the pictures.
        out: uint8 (B, S, S, 3), the result; zeros where the status is not OK.
        status: int32 (B,): OK, CRC_MISMATCH, DECODER_REFUSED or SIZE_MISMATCH.
    """
    side = out.shape[1]
    for b in range(len(starts)):
        target = out[b]
        if crc32c(stored, starts[b], sizes[b]) != crcs[b]:
            status[b] = CRC_MISMATCH
            target[:] = 0
            continue
        height, width = heights[b], widths[b]
        if not has_size(stored, starts[b], sizes[b], height, width):
            status[b] = SIZE_MISMATCH
            target[:] = 0
            continue
        refused = decode_into(stored.ctypes.data + starts[b], sizes[b], height, width, scratch.ctypes.data)
        if refused != 0:
            status[b] = DECODER_REFUSED
            target[:] = 0
            continue
        status[b] = OK
        top, left, box_height, box_width = boxes[b, 0], boxes[b, 1], boxes[b, 2], boxes[b, 3]
        c_resize(  # type: ignore[call-overload]
            0,
            np.int64(scratch.ctypes.data),
            height,
            width,
            np.int64(top),
            np.int64(top + box_height),
            np.int64(left),
            np.int64(left + box_width),
            np.int64(target.ctypes.data),
            np.int64(side),
            np.int64(side),
        )
        if flips[b]:
            for y in range(side):
                for x in range(side // 2):
                    for c in range(3):
                        kept = target[y, x, c]
                        target[y, x, c] = target[y, side - 1 - x, c]
                        target[y, side - 1 - x, c] = kept
