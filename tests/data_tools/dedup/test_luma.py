from io import BytesIO

import numpy as np
import pytest
from dedup_data import make_photo
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data_tools.dedup.fingerprint import Box, pdq_hashes, square_luma, trimmed


def after_jpeg(image: Image.Image, quality: int = 75) -> np.ndarray:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def test_a_picture_of_that_size_is_pillows_gray():
    for seed in range(5):
        photo = make_photo(seed, 64, 64)
        difference = square_luma(np.asarray(photo)).astype(int) - np.asarray(photo.convert("L"))
        assert np.abs(difference).max() <= 1


def overlaps(size: int) -> np.ndarray:
    """float64 (64, size): which share of the mean over each 64th of a side comes from each pixel."""
    starts, pixels = np.arange(64)[:, None] * size / 64, np.arange(size)[None]
    lengths = np.minimum(starts + size / 64, pixels + 1) - np.maximum(starts, pixels)
    return np.clip(lengths, 0, None) / (size / 64)


def area_means(rgb: np.ndarray) -> np.ndarray:
    """float64 (64, 64): what each pixel of the square covers, averaged."""
    gray = rgb.astype(np.float64) @ (0.299, 0.587, 0.114)
    return overlaps(rgb.shape[0]) @ gray @ overlaps(rgb.shape[1]).T


# A side below 64 pixels, of 64, above it, a multiple and none; and both ways.
SIDES = st.sampled_from([1, 2, 5, 17, 63, 64, 65, 127, 128, 192, 300, 777, 1031])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SIDES, SIDES)
def test_every_size_is_means_of_areas(height, width):
    rng = np.random.default_rng(height * 2000 + width)
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    for rgb in (np.asarray(make_photo(7, height, width)), noise, np.where(noise > 127, 255, 0).astype(np.uint8)):
        luma = square_luma(rgb)
        assert luma.shape == (64, 64) and luma.dtype == np.uint8
        # Rounded once; float64 may fall to the other side of a half.
        assert np.abs(luma - area_means(rgb)).max() <= 0.5 + 1e-6


def test_large_pictures_do_not_overflow():
    """All of it white: sums of 32 bits hold 255 times the height and no more is added up in them."""
    for height, width in ((70_000, 3), (3, 70_000), (6_000, 5_000)):
        white = np.full((height, width, 3), 255, np.uint8)
        np.testing.assert_array_equal(square_luma(white), 255)


def test_pixels_repeated_change_nothing():
    """Crops of small pictures are of such: by means of areas they are what the small picture shows."""
    for height, width in ((30, 40), (1, 7), (63, 65), (200, 90)):
        rgb = np.asarray(make_photo(9, height, width))
        for factor in (2, 3, 5):
            np.testing.assert_array_equal(square_luma(rgb.repeat(factor, 0).repeat(factor, 1)), square_luma(rgb))


@pytest.mark.parametrize("smoothing", [Image.Resampling.BOX, Image.Resampling.LANCZOS])
def test_thin_pictures_keep_their_hash_when_their_size_changes(smoothing):
    """One side below 64 pixels, above it in the other size: 40 x 300 and 128 x 960 show the same."""
    for seed in range(12):
        large = make_photo(seed, 128, 960)
        small = large.resize((300, 40), smoothing)
        for one, other in ((small, large), (small.rotate(90, expand=True), large.rotate(90, expand=True))):
            hashes, qualities = pdq_hashes(np.stack([square_luma(np.asarray(one)), square_luma(np.asarray(other))]))
            assert qualities.min() >= 50
            assert np.unpackbits(hashes[0] ^ hashes[1]).sum() <= 31


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


@pytest.mark.parametrize(
    ("left", "top", "right", "bottom"),
    [(15, 15, 15, 15), (0, 40, 0, 40), (31, 0, 29, 0), (0, 0, 0, 25), (20, 7, 0, 12)],
)
def test_uniform_borders_are_found_after_jpeg(left, top, right, bottom):
    for seed, colour in enumerate(("white", "black", "navy", "khaki")):
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
