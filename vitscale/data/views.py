"""What the loader would show of pictures that lie in no shard."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitscale.data.augmentation import EvalTransform
from vitscale.images import OK, decode_slice


def views_of(jpegs: Sequence[tuple[bytes, int, int]], transform: EvalTransform, image_size: int) -> Tensor:
    """uint8 (B, S, S, 3) of JPEGs, each with its height and width in pixels, as evaluation sees them in a shard.

    They are good ones: whoever made them has looked.
    """
    count = len(jpegs)
    sizes, heights, widths = np.array([(len(file), *size) for file, *size in jpegs], np.int64).T
    out, status = np.empty((count, image_size, image_size, 3), np.uint8), np.full(count, OK, np.int32)
    keys = np.zeros(count, np.uint64)
    decode_slice(
        np.frombuffer(b"".join(file for file, _, _ in jpegs), np.uint8),
        np.cumsum(sizes) - sizes,
        sizes,
        np.zeros(count, np.uint32),
        np.zeros(count, bool),
        np.zeros(count, bool),
        heights,
        widths,
        transform.boxes(keys, heights, widths),
        transform.flips(keys),
        False,
        out,
        status,
    )
    assert (status == OK).all(), f"statuses {status.tolist()} of pictures that were found good"
    return torch.from_numpy(out)
