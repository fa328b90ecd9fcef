"""JPEGs that are written: as Pillow writes them with the same settings."""

import io

import numpy as np
import pytest
from pictures import encoded, make_picture
from PIL import Image

from vitscale.ground.images import OK, check, encode


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("quality", [1, 75, 90, 95, 100])
def test_written_as_pillow_writes(quality):
    picture = make_picture(2, 45, 50)
    written = encode(np.asarray(picture), quality)
    assert check(written, 45, 50) == OK
    with opened(written) as ours, opened(encoded(picture, quality=quality, subsampling="4:4:4")) as theirs:
        assert ours.quantization == theirs.quantization and ours.layer == theirs.layer
        assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs)).mean() < 0.1
        assert set(ours.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi"}


def test_the_worst_pictures_fit():
    rng = np.random.default_rng(0)
    for shape in ((8, 8, 3), (1, 1, 3), (9, 17, 3), (64, 64, 3)):
        for _ in range(10):
            pixels = (rng.integers(0, 2, shape) * 255).astype(np.uint8)
            assert check(encode(pixels, 100), *shape[:2]) == OK


def test_extreme_sides():
    for shape in ((1, 65500, 3), (65500, 1, 3), (1, 1, 3)):
        with opened(encode(np.full(shape, 200, np.uint8), 95)) as image:
            assert image.size == (shape[1], shape[0]) and np.abs(np.asarray(image).astype(int) - 200).max() <= 1
    for shape in ((1, 65501, 3), (65501, 1, 3), (0, 1, 3), (1, 0, 3)):
        with pytest.raises(ValueError, match=rf"{shape[1]}.*{shape[0]}|{shape[0]}.*{shape[1]}"):
            encode(np.zeros(shape, np.uint8), 95)
