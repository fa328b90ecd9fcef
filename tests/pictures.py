"""Pictures for tests that need no real ones."""

import io

import numpy as np
from PIL import Image


def make_picture(seed: int, height: int, width: int) -> Image.Image:
    """An RGB picture with smooth structure that differs by seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
