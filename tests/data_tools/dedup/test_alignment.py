from itertools import pairwise

import numpy as np
import pytest
from dedup_data import make_photo
from PIL import Image

from data_tools.dedup.fingerprint import Window, square_luma
from data_tools.dedup.matching import correlation

WHOLE = Window(0, 0, 1, 1)
HEIGHT, WIDTH = 900, 1200


def luma(image: Image.Image) -> np.ndarray:
    return square_luma(np.asarray(image))


def cropped(image: Image.Image, window: Window) -> Image.Image:
    left, top = window.left * image.width, window.top * image.height
    box = (left, top, left + window.width * image.width, top + window.height * image.height)
    return image.crop(tuple(map(round, box)))


def means(pixels: np.ndarray) -> np.ndarray:
    """Of 2 x 2 pixels, flat."""
    return pixels.astype(np.float64).reshape(32, 2, 32, 2).mean((1, 3)).ravel()


@pytest.fixture(scope="module")
def photos() -> list[Image.Image]:
    return [make_photo(100 + i, HEIGHT, WIDTH) for i in range(8)]


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(
    ("shown", "start"),
    [
        (Window(0.05, 0.05, 0.9, 0.9), Window(0.07, 0.03, 0.9, 0.9)),
        (Window(0.02, 0.06, 0.92, 0.92), Window(0.05, 0.05, 0.9, 0.9)),
        (Window(0.1, 0.0, 0.8, 0.8), Window(0.1, 0.03, 0.83, 0.77)),
        (Window(0.03, 0.125, 0.94, 0.75), Window(0.0, 0.125, 1.0, 0.75)),
        (Window(0.06, 0.02, 0.84, 0.88), Window(0.1, 0.06, 0.84, 0.84)),
        (WHOLE, Window(0.02, 0.02, 0.96, 0.96)),
    ],
)
def test_finds_the_window_that_a_crop_shows(photos, shown, start, mirrored):
    for photo in photos:
        crop = cropped(photo, shown).resize((300, 240), Image.Resampling.BICUBIC)
        query = luma(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else crop)
        # At the start it is 0.85 to 0.97.
        assert correlation(query, luma(photo), start, mirrored=mirrored) > 0.99


def test_other_photos_and_wrong_windows_stay_low(photos):
    lumas = [luma(photo) for photo in photos]
    pairs = [(i, j) for i in range(len(lumas)) for j in range(len(lumas)) if i != j]
    for window in (WHOLE, Window(0.1, 0.1, 0.8, 0.8)):
        assert max(correlation(lumas[i], lumas[j], window, mirrored=False) for i, j in pairs) < 0.7
    assert max(correlation(one, one, WHOLE, mirrored=True) for one in lumas) < 0.7  # mirrored, they are others


def test_equals_pearsons_correlation_where_nothing_is_to_be_found(photos):
    one = luma(photos[0])
    assert correlation(one, one, WHOLE, mirrored=False) == 1
    assert correlation(one[:, ::-1], one, WHOLE, mirrored=True) == 1
    assert correlation(255 - one, one, WHOLE, mirrored=False) == -1
    # Noise in which no small move fits better than the start.
    rng = np.random.default_rng(0)
    for strength in (20, 60, 120):
        noisy = np.clip(one + strength * rng.standard_normal(one.shape), 0, 255).astype(np.uint8)
        expected = np.corrcoef(means(one), means(noisy))[0, 1]
        assert correlation(noisy, one, WHOLE, mirrored=False) == pytest.approx(expected, abs=0.02)


def test_flat_pictures_are_like_nothing(photos):
    flat = np.full((64, 64), 200, np.uint8)
    for query, image in ((flat, luma(photos[0])), (luma(photos[0]), flat), (flat, flat)):
        assert correlation(query, image, WHOLE, mirrored=False) == 0


def framed(pixels: np.ndarray, width: int, value: int) -> np.ndarray:
    out = np.full((64, 64), value, np.uint8)
    out[width:-width, width:-width] = pixels[width:-width, width:-width]
    return out


def inside(width: int) -> Window:
    return Window(width / 64, width / 64, 1 - width / 32, 1 - width / 32)


@pytest.mark.parametrize("width", [6, 16, 20])
def test_borders_do_not_count(photos, width):
    """Frames alike make strangers alike; frames unlike make a picture unlike itself."""
    pale = [(200 + luma(photo) * 0.1).astype(np.uint8) for photo in photos]
    own = inside(width)
    for one, other in pairwise(pale):
        whole = correlation(framed(one, width, 0), framed(other, width, 0), WHOLE, mirrored=False)
        assert whole > 0.95
        bare = {"inside_query": own, "inside_image": own}
        assert correlation(framed(one, width, 0), framed(other, width, 0), WHOLE, mirrored=False, **bare) < 0.8
        assert correlation(framed(one, width, 0), framed(one, width, 255), WHOLE, mirrored=False) < 0.5
        assert correlation(framed(one, width, 0), framed(one, width, 255), WHOLE, mirrored=False, **bare) == 1
        # One of the two says enough.
        for only in bare:
            assert correlation(framed(one, width, 0), one, WHOLE, mirrored=False, **{only: own}) == 1


def test_hardly_anything_but_border_is_like_nothing(photos):
    one, corner = luma(photos[0]), Window(0.7, 0.7, 0.3, 0.3)  # 9 % of the pixels
    for bare in ({"inside_query": corner}, {"inside_image": corner}):
        assert correlation(one, one, WHOLE, mirrored=False, **bare) == 0
    apart = {"inside_query": Window(0, 0, 0.5, 1), "inside_image": Window(0.5, 0, 0.5, 1)}
    assert correlation(one, one, WHOLE, mirrored=False, **apart) == 0
