from io import BytesIO

import numpy as np
import pytest
from dedup_data import make_photo
from PIL import Image, ImageOps

from data_tools.dedup.luma import Box, square_luma, trimmed


def after_jpeg(image: Image.Image, quality: int = 75) -> np.ndarray:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def test_a_picture_of_that_size_is_pillows_gray():
    for seed in range(5):
        photo = make_photo(seed, 64, 64)
        difference = square_luma(np.asarray(photo)).astype(int) - np.asarray(photo.convert("L"))
        assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(128, 128), (192, 320), (64, 256), (640, 128)])
def test_larger_ones_are_means_of_areas(height, width):
    rgb = np.asarray(make_photo(7, height, width))
    blocks = rgb.astype(np.float64).reshape(64, height // 64, 64, width // 64, 3).mean((1, 3))
    expected = blocks @ (0.299, 0.587, 0.114)
    luma = square_luma(rgb)
    assert luma.shape == (64, 64) and luma.dtype == np.uint8
    assert np.abs(luma - expected).max() <= 1.01  # each channel is rounded, and then their sum


def test_a_box_is_as_a_picture_of_its_own():
    rgb = np.asarray(make_photo(8))
    box = Box(11, 23, 150, 201)
    own = np.ascontiguousarray(rgb[11:161, 23:224])
    np.testing.assert_array_equal(square_luma(rgb, box), square_luma(own))
    np.testing.assert_array_equal(square_luma(rgb[:, ::-1]), square_luma(np.ascontiguousarray(rgb[:, ::-1])))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 300), (5, 2), (63, 65)])
def test_sizes_of_any_kind(height, width):
    flat = np.full((height, width, 3), (10, 200, 90), np.uint8)
    np.testing.assert_array_equal(square_luma(flat), np.full((64, 64), round(0.299 * 10 + 0.587 * 200 + 0.114 * 90)))


def test_enlarging_keeps_the_picture():
    photo = make_photo(9, 400, 300).resize((30, 40), Image.Resampling.BOX)
    large = enlarged(np.asarray(photo), 160, 120)
    assert large.shape == (160, 120, 3)
    back = Image.fromarray(large).resize(photo.size, Image.Resampling.BOX)
    assert np.corrcoef(np.asarray(back).ravel(), np.asarray(photo).ravel())[0, 1] > 0.99


@pytest.mark.parametrize("colour", ["white", "black", "navy", "khaki"])
@pytest.mark.parametrize(
    ("left", "top", "right", "bottom"),
    [(15, 15, 15, 15), (0, 40, 0, 40), (31, 0, 29, 0), (0, 0, 0, 25), (20, 7, 0, 12)],
)
def test_uniform_borders_are_found_after_jpeg(colour, left, top, right, bottom):
    for seed in range(3):
        rgb = after_jpeg(ImageOps.expand(make_photo(seed), (left, top, right, bottom), colour))
        box = trimmed(rgb)
        assert box is not None
        edges = (box.top, box.left, box.top + box.height, box.left + box.width)
        np.testing.assert_allclose(edges, (top, left, top + 200, left + 260), atol=2)


def test_bars_of_two_colours_are_found():
    photo = ImageOps.expand(ImageOps.expand(make_photo(3), (0, 0, 0, 20), "white"), (0, 30, 0, 0), "black")
    box = trimmed(after_jpeg(photo))
    np.testing.assert_allclose(box, (30, 0, 200, 260), atol=2)


def test_pictures_without_borders_are_left_alone():
    for seed in range(20):
        assert trimmed(after_jpeg(make_photo(seed))) is None


def test_pictures_of_nothing_else_are_left_alone():
    assert trimmed(np.full((50, 70, 3), 200, np.uint8)) is None
    assert trimmed(np.zeros((1, 1, 3), np.uint8)) is None


def test_nothing_is_trimmed_where_less_than_half_would_be_left():
    small = ImageOps.expand(make_photo(4, 90, 90), 60, "white")  # 90 of 210
    assert trimmed(after_jpeg(small)) is None
