"""Thumbnails of at most 128 x 128 pixels, for people to look at."""

import numpy as np
from PIL import Image

from vitscale.ground.images import encode

SIDE = 128  # pixels of the longer side at most
_QUALITY = 85


def small_picture(rgb: np.ndarray) -> bytes:
    """A picture, uint8 (height, width, 3), as a JPEG of at most 128 x 128 pixels."""
    height, width, _ = rgb.shape
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = Image.fromarray(rgb).resize(size, Image.Resampling.BOX)
    return encode(np.asarray(small), _QUALITY)
