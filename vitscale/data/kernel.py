"""The compiled heart of the loader: stored bytes -> checked, decoded, cropped, resized, flipped pixels.

One thread works on one slice at a time; Python threads call it side by side, so no threading layer of numba's plays a
part. What a view is, `view.c` says.
"""

import numpy as np
from numba import njit

from vitscale.data.view import c_view_jpeg, c_view_raw
from vitscale.shards import crc32c

OK, CRC_MISMATCH, DECODER_REFUSED, SIZE_MISMATCH, NO_MEMORY = 0, 1, 2, 3, 4


@njit(nogil=True, cache=True)
def decode_slice(stored, starts, sizes, crcs, checked, raw, heights, widths, boxes, flips, may_scale, out, status):
    """Fill `out` and `status` for B samples.

    Args:
        stored: uint8, the samples' stored bytes, sample b at [starts[b], starts[b] + sizes[b]).
        crcs: uint32 (B,), CRC-32C of each sample's stored bytes.
        checked: bool (B,), whether it is compared.
        raw: bool (B,), whether the stored bytes are pixels, not a JPEG.
        heights, widths: int64 (B,), size of the stored picture.
        boxes: int32 (B, 4), top, left, height, width of what is seen.
        flips: bool (B,).
        may_scale: bool, whether the decoder may halve a picture that is large enough.
        out: uint8 (B, S, S, 3), the result; zeros where the status is not OK.
        status: int32 (B,); a sample that comes with another status than OK stays as it is.
    """
    side = out.shape[1]
    for b in range(len(starts)):
        if status[b] == OK and checked[b] and crc32c(stored, starts[b], sizes[b]) != crcs[b]:
            status[b] = CRC_MISMATCH
        if status[b] == OK:
            top, left, height, width = boxes[b, 0], boxes[b, 1], boxes[b, 2], boxes[b, 3]
            address = np.uintp(stored.ctypes.data + starts[b])
            target = np.uintp(out[b].ctypes.data)
            if raw[b]:
                status[b] = c_view_raw(  # type: ignore[call-overload]
                    address,
                    np.uint64(sizes[b]),
                    np.int64(heights[b]),
                    np.int64(widths[b]),
                    np.int64(top),
                    np.int64(left),
                    np.int64(height),
                    np.int64(width),
                    np.int64(flips[b]),
                    target,
                    np.int64(side),
                )
            else:
                status[b] = c_view_jpeg(  # type: ignore[call-overload]
                    address,
                    np.uint64(sizes[b]),
                    np.int64(heights[b]),
                    np.int64(widths[b]),
                    np.int64(top),
                    np.int64(left),
                    np.int64(height),
                    np.int64(width),
                    np.int64(flips[b]),
                    np.int64(may_scale),
                    target,
                    np.int64(side),
                )
        if status[b] != OK:
            out[b] = 0
