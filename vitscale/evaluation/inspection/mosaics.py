"""Pictures of many small ones: tiles in rows and columns, as one array of pixels.

Shape legend: R rows, C columns, h w height and width of a tile in pixels.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageFilter

TILE = 128  # the side of a shown picture in pixels
_GAP = 4


def mosaic(tiles: Sequence[Sequence[np.ndarray]], gap: int = _GAP) -> np.ndarray:
    """Rows of tiles, uint8 (h, w, 3) -> one RGBA picture, uint8, transparent between the tiles."""
    h, w, _ = tiles[0][0].shape
    columns = max(map(len, tiles))
    out = np.zeros((len(tiles) * (h + gap) - gap, columns * (w + gap) - gap, 4), np.uint8)
    for row, line in enumerate(tiles):
        for column, tile in enumerate(line):
            at = (slice(row * (h + gap), row * (h + gap) + h), slice(column * (w + gap), column * (w + gap) + w))
            out[at][..., :3] = tile
            out[at][..., 3] = 255
    return out


def picture_tile(picture: np.ndarray, side: int = TILE) -> np.ndarray:
    """A picture, uint8 (S, S, 3), resized to `side` pixels; the pixels of enlarged ones stay sharp."""
    how = Image.Resampling.LANCZOS if picture.shape[0] > side else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(picture).resize((side, side), how))


def colour_tile(values: np.ndarray, side: int = TILE) -> np.ndarray:
    """Colours (n, n, 3) in [0, 1] as a tile, each as a square."""
    return picture_tile((values * 255).round().astype(np.uint8), side)


def heat_tile(values: np.ndarray, low: float, high: float, side: int = TILE) -> np.ndarray:
    """Numbers (n, n) as a tile in viridis colours: dark for `low` and less, yellow for `high` and more."""
    from matplotlib import colormaps

    scaled = np.clip((values - low) / max(high - low, 1e-30), 0, 1)
    return picture_tile(colormaps["viridis"](scaled, bytes=True)[..., :3], side)


def lit_tile(picture: np.ndarray, weights: np.ndarray, side: int = TILE) -> np.ndarray:
    """A picture dimmed by weights (n, n), smoothly; where the weight is largest it keeps its brightness."""
    scaled = Image.fromarray((weights / max(weights.max(), 1e-30)).astype(np.float32))
    smooth = np.clip(np.asarray(scaled.resize((side, side), Image.Resampling.BICUBIC)), 0, 1)
    grey = Image.fromarray((smooth * 255).round().astype(np.uint8))
    mask = np.asarray(grey.filter(ImageFilter.GaussianBlur(side / len(weights) / 2)), np.float32)
    return (picture_tile(picture, side) * (mask / max(mask.max(), 1))[..., None]).round().astype(np.uint8)
