from itertools import pairwise

import numpy as np
import pytest
from dedup_data import make_photo

from data_tools.dedup.fingerprint import Box
from data_tools.dedup.variants import CROPS, LEVELS, crops_of, variant_name, variants_of, window_of

SIZES = [(200, 260), (300, 200), (128, 128), (32, 32), (17, 90), (1, 1), (1000, 40)]


@pytest.mark.parametrize(("level", "count"), list(enumerate([2, 8, 16, 96])))
def test_levels_have_the_published_number_of_distinct_variants(level, count):
    assert variants_of(level) == count
    windows = {window_of(code, 300, 400, None) for code in range(0, count, 2)}
    assert len(windows) == count // 2
    assert len({variant_name(code) for code in range(count)}) == count


def test_levels_build_on_each_other():
    photo = np.asarray(make_photo(0))
    boxes = [dict(crops_of(photo, level)[1]) for level in range(len(LEVELS))]
    for fewer, more in pairwise(boxes):
        assert fewer.items() < more.items()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_crops_lie_in_the_picture_and_are_the_windows_said(height, width):
    picture, crops = crops_of(np.asarray(make_photo(1, height, width)), len(LEVELS) - 1)
    tall, wide, _ = picture.shape
    assert tall % height == 0 and tall // height == wide // width
    boxes = [box for _, box in crops]
    assert len(set(boxes)) == len(boxes)
    assert crops[0] == (0, Box(0, 0, tall, wide))
    for number, box in crops:
        assert box.top >= 0 and box.left >= 0 and box.height >= 1 and box.width >= 1
        assert box.top + box.height <= tall and box.left + box.width <= wide
        window = window_of(2 * number, height, width, None)
        assert window == window_of(2 * number + 1, height, width, None)
        expected = (window.top * tall, window.left * wide, window.height * tall, window.width * wide)
        np.testing.assert_allclose(box, expected, atol=1)


def test_small_pictures_are_enlarged_so_that_crops_differ():
    small = np.asarray(make_photo(2, 32, 32))
    picture, crops = crops_of(small, 3)
    assert picture.shape == (128, 128, 3)
    # Of a square picture, the two centred squares are crops that there are already: whole, and 87.5 % of it.
    assert len(crops) == len(CROPS) - 1
    assert crops_of(small, 0)[0].shape == (32, 32, 3)


def test_long_narrow_pictures_are_not_enlarged_beyond_measure():
    strip = np.zeros((2, 5000, 3), np.uint8)
    picture, _ = crops_of(strip, 3)
    assert picture.shape == strip.shape


def test_squares_are_the_largest_in_the_middle():
    for height, width, expected in ((300, 400, (0, 0.125, 1, 0.75)), (400, 200, (0.25, 0, 0.5, 1))):
        code = next(2 * i for i, crop in enumerate(CROPS) if crop.square and crop.scale == 1)
        np.testing.assert_allclose(window_of(code, height, width, None), expected)


def test_the_trimmed_picture_comes_after_the_crops():
    code = 2 * len(CROPS)
    assert window_of(code, 100, 200, Box(10, 20, 80, 150)) == (0.1, 0.1, 0.8, 0.75)
    assert variant_name(code) == "trimmed" and variant_name(code + 1) == "trimmed, mirrored"
    assert code + 1 < 256  # a byte has to hold it
