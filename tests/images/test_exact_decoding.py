"""Both ways of decoding against libjpeg-turbo's own program, bit for bit; the exact one against Pillow, too.

TensorFlow decodes by the fast DCT unless it is told otherwise, Pillow and torchvision by the exact one.
"""

import io
import os
import shutil
import subprocess

import numpy as np
import pytest
from pictures import encoded, make_picture
from PIL import Image

from vitscale.ground.images import OK, decode

# Sides that are no multiples of a block, and of the 16 pixels that share one colour.
SIZES = [(64, 96), (131, 77), (17, 250)]
KINDS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "4:2:0, coarse": {"subsampling": 2, "quality": 20},
    "progressive 4:4:4": {"subsampling": 0, "progressive": True},
    "progressive 4:2:0": {"subsampling": 2, "progressive": True},
}


@pytest.fixture(scope="module")
def djpeg() -> str:
    program = shutil.which("djpeg")
    if program is None:
        message = "no djpeg here: apt-get install libjpeg-turbo-progs"
        (pytest.fail if "CI" in os.environ else pytest.skip)(message)
    return program


def pixels(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def noisy(height: int, width: int) -> Image.Image:
    """A picture of which much is lost, so that the two ways of decoding differ."""
    smooth = np.asarray(make_picture(3, height, width)).astype(int)
    noise = np.random.default_rng(height).integers(-60, 61, smooth.shape)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("kind", [*KINDS, "gray"])
def test_pixels_are_those_of_djpeg_and_the_exact_ones_those_of_pillow(djpeg, kind):
    for height, width in SIZES:
        picture = noisy(height, width)
        jpeg = encoded(picture.convert("L")) if kind == "gray" else encoded(picture, **KINDS[kind])
        found = {}
        for exact, name in ((True, "int"), (False, "fast")):
            command = [djpeg, "-dct", name, "-rgb", "-pnm"]
            expected = pixels(subprocess.run(command, input=jpeg, capture_output=True, check=True).stdout)
            status, found[name] = decode(jpeg, height, width, exact=exact)
            assert status == OK
            assert np.array_equal(found[name], expected), (name, height, width)
        assert np.array_equal(found["int"], pixels(jpeg)), "Pillow's"
        assert not np.array_equal(found["int"], found["fast"])  # else nothing has been told apart
