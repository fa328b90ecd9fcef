"""Masks of blocks of patches, as BEiT and DINOv2 draw them, with exact counts, as DINOv3 completes them.

Published masks are drawn for what one GPU computes at once. Here they are drawn for a group of neighbouring slots of
the global batch, from the samples' keys: the same on every world and after resuming.

Shape legend: B batch, V crops of an image, N patches, M masked crops, T attempts.
"""

import math
from collections.abc import Sequence

import numpy as np

from vitscale.data.draws import Purpose, between_ratios, combine, mix, orders, uniform

_ASPECT = (0.3, 1 / 0.3)  # rows / columns of a block
_LEAST_AREA = 4  # patches of a block, unless fewer are wanted
_FAILURES = 10  # in a row, after which no more blocks are tried
_ATTEMPTS = 64  # for one crop, whatever comes of them


def block_masks(keys: np.ndarray, grid: int, crops: int, counts: Sequence[int]) -> np.ndarray:
    """Which patches are masked, bool (B, V, N).

    Args:
        keys: of the samples, uint64 (B,); whole groups of neighbours.
        grid: patches along one side.
        crops: V.
        counts: how many patches are masked in each crop of a group that has any masked; which crops these are is drawn
            for each group. A group has as many crops as `counts` entries, those without masked patches being 0.
    """
    group = len(counts) // crops
    of_crops = np.stack([mix(keys.view(np.uint64) ^ combine(Purpose.MASKED, crop)) for crop in range(crops)], axis=1)
    drawn = np.argsort(of_crops.reshape(-1, group * crops), axis=1, kind="stable")
    wanted = np.empty(drawn.shape, np.int64)
    np.put_along_axis(wanted, drawn, np.broadcast_to(np.asarray(counts, np.int64), drawn.shape), axis=1)
    masks = np.zeros((wanted.size, grid**2), bool)
    masked = np.flatnonzero(wanted)
    masks[masked] = _masks(of_crops.reshape(-1)[masked], grid, wanted.reshape(-1)[masked])
    return masks.reshape(len(keys), crops, grid**2)


def _masks(keys_M: np.ndarray, grid: int, wanted_M: np.ndarray) -> np.ndarray:
    """Masks with so many patches each: blocks, and what they lack at random; bool (M, N)."""
    attempts_MT = mix(keys_M[:, None] ^ np.arange(_ATTEMPTS, dtype=np.uint64))
    area, aspect, top, left = (uniform(attempts_MT, Purpose.BLOCK, part) for part in range(4))
    draws = np.stack([area, between_ratios(_ASPECT, aspect), top, left], axis=-1).tolist()
    blocks = [_blocks(wanted, grid, of_crop) for wanted, of_crop in zip(wanted_M.tolist(), draws, strict=True)]
    size = -(-(grid**2) // 8)
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in blocks), np.uint8)
    masks_MN = np.unpackbits(packed.reshape(-1, size), axis=1, count=grid**2, bitorder="little").astype(bool)
    order_MN = orders(keys_M, grid**2, Purpose.BLOCK)
    is_free = ~np.take_along_axis(masks_MN, order_MN, axis=1)
    missing_M1 = (wanted_M - masks_MN.sum(axis=1))[:, None]
    np.put_along_axis(masks_MN, order_MN, ~is_free | (np.cumsum(is_free, axis=1) <= missing_M1), axis=1)
    return masks_MN


def _blocks(wanted: int, grid: int, draws: Sequence[Sequence[float]]) -> int:
    """Blocks with at most `wanted` patches in all, as bits of an integer: patch n is bit n.

    Python's integers are faster here than arrays: a crop has about ten blocks, one after the other.
    """
    mask, missing, failures = 0, wanted, 0
    for area, aspect, top, left in draws:
        if missing == 0 or failures == _FAILURES:
            break
        size = _LEAST_AREA + (min(missing, grid**2 / 2) - _LEAST_AREA) * area
        height, width = round(math.sqrt(size * aspect)), round(math.sqrt(size / aspect))
        failures += 1
        if height < grid and width < grid:
            row = ((1 << width) - 1) << int(left * (grid - width + 1))
            first = int(top * (grid - height + 1))
            block = sum(row << grid * (first + index) for index in range(height))
            added = (block & ~mask).bit_count()
            if 0 < added <= missing:
                mask, missing, failures = mask | block, missing - added, 0
    return mask
