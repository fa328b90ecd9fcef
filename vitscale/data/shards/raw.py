"""Images stored as raw pixels, which files of FFCV's own writer may contain: height x width x 3 bytes, RGB."""

import io

import numpy as np
from PIL import Image


def raw_to_rgb(content: bytes, height: int, width: int) -> np.ndarray:
    """The stored bytes as pixels, uint8 (height, width, 3), read-only."""
    return np.frombuffer(content, np.uint8).reshape(height, width, 3)


def raw_to_png(content: bytes, height: int, width: int) -> bytes:
    """A PNG of the same pixels."""
    png = io.BytesIO()
    Image.fromarray(raw_to_rgb(content, height, width)).save(png, "PNG")
    return png.getvalue()
