"""Evaluation's view of pictures that are in no shard, as the loader would give it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitscale.data.augmentation import EvalTransform
from vitscale.ground.images import OK, decode_slice


def views_of(jpegs: Sequence[tuple[bytes, int, int]], transform: EvalTransform, image_size: int) -> Tensor:
    """JPEGs as evaluation would see them from a shard, uint8 (B, S, S, 3).

    Args:
        jpegs: (the file's bytes, height, width in pixels) of each picture; the caller has checked that they decode.
        transform: evaluation's crop.
        image_size: side S of the output in pixels.
    """
    return _views(jpegs, False, transform, image_size)


def view_of_pixels(rgb: np.ndarray, transform: EvalTransform, image_size: int) -> Tensor:
    """A picture, uint8 (height, width, 3), as evaluation sees it, uint8 (1, S, S, 3)."""
    height, width, _ = rgb.shape
    return _views([(rgb.tobytes(), height, width)], True, transform, image_size)


def _views(
    stored: Sequence[tuple[bytes, int, int]], are_raw: bool, transform: EvalTransform, image_size: int
) -> Tensor:
    count = len(stored)
    sizes, heights, widths = np.array([(len(content), *size) for content, *size in stored], np.int64).T
    out, status = np.empty((count, image_size, image_size, 3), np.uint8), np.full(count, OK, np.int32)
    keys = np.zeros(count, np.uint64)
    decode_slice(
        np.frombuffer(b"".join(content for content, _, _ in stored), np.uint8),
        np.cumsum(sizes) - sizes,
        sizes,
        np.zeros(count, np.uint32),
        np.zeros(count, bool),
        np.full(count, are_raw),
        heights,
        widths,
        transform.boxes(keys, heights, widths),
        transform.flips(keys),
        False,
        out,
        status,
        resize=transform.resize,
    )
    assert (status == OK).all(), f"statuses {status.tolist()} of pictures that were found good"
    return torch.from_numpy(out)
