"""One view of one picture by the loader's kernel, and by plain means."""

import numpy as np
from picture_shards import picture
from stock_ffcv import ffcv_decode

from vitscale.data.augmentation import sample_keys
from vitscale.ground.images import Resize, crc32c, decode_slice


def kernel_views(
    content, height, width, boxes, side, flips=None, may_scale=False, raw=False, crc=None, resize=Resize.AREA
):
    """Status (n,) and pixels (n, side, side, 3) of n views of one picture; `boxes` as (n, 4)."""
    boxes = np.asarray(boxes, np.int32).reshape(-1, 4)
    count = len(boxes)
    stored = np.frombuffer(content, np.uint8)
    status = np.zeros(count, np.int32)
    around = np.full((count + 2, side, side, 3), 201, np.uint8)
    out = around[1:-1]
    decode_slice(
        stored,
        np.zeros(count, np.int64),
        np.full(count, len(stored)),
        np.full(count, crc32c(stored) if crc is None else crc, np.uint32),
        np.ones(count, bool),
        np.full(count, raw),
        np.full(count, height),
        np.full(count, width),
        boxes[:, None],
        np.zeros((count, 1), bool) if flips is None else np.asarray(flips, bool)[:, None],
        may_scale,
        [out[:, None]],
        [resize],
        status,
    )
    assert (around[0] == 201).all() and (around[-1] == 201).all()  # nothing is written beside
    return status, out


def whole_picture(content, height, width):
    """As stock FFCV decodes it."""
    pixels = ffcv_decode(content, height, width)
    assert pixels is not None
    return pixels


def area_mean(pixels, side):
    """The mean over the area of each output pixel, as the difference of the integral at its ends."""

    def along_first(values):
        integral = np.concatenate([np.zeros_like(values[:1]), values.cumsum(axis=0)])
        ends = np.arange(side + 1) * len(values) / side
        low = np.minimum(ends.astype(int), len(values) - 1)
        at_ends = integral[low] + (ends - low)[:, None, None] * values[low]
        return np.diff(at_ends, axis=0) * side / len(values)

    return along_first(along_first(pixels.astype(float)).transpose(1, 0, 2)).transpose(1, 0, 2)


def expected_view(uid, transform, epoch, seed, side, decode=whole_picture, view=0):
    """What training sees of a picture of `picture_shards`, by other means: another decoder perhaps, another resizer."""
    content, height, width = picture(uid)
    pixels = decode(content, height, width)
    key = sample_keys(seed, epoch, np.array([uid]), np.array([view]))
    top, left, h, w = transform.boxes(key, np.array([height]), np.array([width]))[0]
    seen = area_mean(pixels[top : top + h, left : left + w], side)
    return seen[:, ::-1] if transform.flips(key)[0] else seen
