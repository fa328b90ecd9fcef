"""Masks of blocks: exact counts on every grid, the same in any parts, and blocks rather than single patches."""

import numpy as np
import pytest

from vitscale.data.draws import hashes
from vitscale.objectives.block_masks import block_masks
from vitscale.recipe.dino import masked_counts


@pytest.mark.parametrize(
    ("grid", "crops", "total"),
    [(8, 8, 88), (8, 64, 615), (14, 16, 507), (14, 32, 974), (14, 128, 3771), (16, 16, 663), (16, 64, 2496)],
)
def test_counts_are_those_of_dinov3(grid, crops, total):
    assert sum(masked_counts(crops, grid**2, 0.5, (0.1, 0.5))) == total


@pytest.mark.parametrize("grid", [1, 2, 3, 4, 7, 8, 16, 32])
def test_counts_are_met_on_every_grid(grid):
    counts = masked_counts(8, grid**2, 0.5, (0.1, 0.5))
    masks = block_masks(hashes(40, 1), grid, 2, counts)
    assert masks.shape == (40, 2, grid**2)
    for group in masks.reshape(10, 8, grid**2):
        assert sorted(group.sum(axis=1)) == sorted(counts)


def test_a_group_has_the_same_masks_in_any_part_of_the_batch():
    keys, counts = hashes(32, 2), masked_counts(8, 196, 0.5, (0.1, 0.5))
    whole = block_masks(keys, 14, 2, counts)
    for size in (4, 8, 16):
        parts = [block_masks(keys[start : start + size], 14, 2, counts) for start in range(0, 32, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    other = block_masks(hashes(32, 3), 14, 2, counts)
    assert not np.array_equal(other, whole)


def test_patches_are_masked_as_often_as_by_the_published_loop():
    """Which masks the middle of 14 x 14 patches in 28.0 %, (3, 3) in 20.0 % and a corner in 2.4 % of 16,384 draws."""
    counts = masked_counts(16, 196, 0.5, (0.1, 0.5))
    masks = block_masks(hashes(2048, 4), 14, 2, counts).reshape(-1, 14, 14)
    assert masks.any(axis=(1, 2)).mean() == 0.5
    often = masks.mean(axis=0)
    assert often[6:8, 6:8].mean() == pytest.approx(0.280, abs=0.02)
    assert often[[3, 3, 10, 10], [3, 10, 3, 10]].mean() == pytest.approx(0.200, abs=0.02)
    assert often[[0, 0, 13, 13], [0, 13, 0, 13]].mean() == pytest.approx(0.024, abs=0.005)
    masked = masks[masks.any(axis=(1, 2))]
    assert masked[:, :, 1:][masked[:, :, :-1]].mean() > 2 * masked.mean()  # neighbours are masked together
