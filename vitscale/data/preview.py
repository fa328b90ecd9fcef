"""Evaluation's view of pictures that are in no shard, as the loader would give it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitscale.data.augmentation import EvalTransform
from vitscale.ground.images import OK, decode_slice


def views_of(
    pictures: Sequence[tuple[bytes, int, int]], transform: EvalTransform, image_size: int, *, are_raw: bool = False
) -> Tensor:
    """Pictures as evaluation would see them from a shard, uint8 (B, S, S, 3).

    Args:
        pictures: (bytes, height, width in pixels) of each JPEG, which the caller has found to decode, or, if they
            `are_raw`, of its pixels, uint8 (height, width, 3).
        transform: evaluation's crop.
        image_size: side S of the output in pixels.
    """
    count = len(pictures)
    sizes, heights, widths = np.array([(len(content), *size) for content, *size in pictures], np.int64).T
    out, status = np.empty((count, image_size, image_size, 3), np.uint8), np.full(count, OK, np.int32)
    keys = np.zeros(count, np.uint64)
    decode_slice(
        np.frombuffer(b"".join(content for content, _, _ in pictures), np.uint8),
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
