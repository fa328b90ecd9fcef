"""The fingerprint by which an image is recognised: digest of its pixels, and perceptual hashes."""

from dataclasses import dataclass

import numpy as np
import xxhash

from data_tools.dedup.luma import Box, Window, square_luma, trimmed
from data_tools.dedup.pdq import pdq_hashes
from data_tools.dedup.settings import FLAT

# Change this whenever the fingerprints change: only those of the same algorithm are comparable.
ALGORITHM = "pdq-64-1"


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one picture."""

    pixels: int  # XXH3-64 of the pixels, seeded by the width
    quality: int  # of the hash, 0 (flat) to 100
    pdq: bytes  # the hash, 32 bytes
    pdq_trimmed: bytes | None  # the hash without uniform borders; None if there are none, or nothing within them
    luma: np.ndarray  # that was hashed, uint8 (64, 64)
    luma_trimmed: np.ndarray | None  # likewise, without borders
    inside: Window | None  # the part of the picture within its borders; None if there are none


def fingerprint(rgb: np.ndarray) -> Fingerprint:
    """The fingerprint of a picture, uint8 (height, width, 3), as it is stored: upright, decoded, not cropped."""
    luma, luma_trimmed, box = lumas_of(rgb)
    hashes, qualities = pdq_hashes(np.stack([luma] if luma_trimmed is None else [luma, luma_trimmed]))
    is_empty = luma_trimmed is None or qualities[1] < FLAT
    return Fingerprint(
        pixels=pixels_digest(rgb),
        quality=int(qualities[0]),
        pdq=hashes[0].tobytes(),
        pdq_trimmed=None if is_empty else hashes[1].tobytes(),
        luma=luma,
        luma_trimmed=luma_trimmed,
        inside=None if box is None else Window.of(box, *rgb.shape[:2]),
    )


def lumas_of(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, Box | None]:
    """A picture's luma, its luma without uniform borders (or None), and the part of the picture within these."""
    box = trimmed(rgb)
    return square_luma(rgb), None if box is None else square_luma(rgb, box), box


def pixels_digest(rgb: np.ndarray) -> int:
    """XXH3-64 of the pixels, in [0, 2**64); seeded by the width, so that equal bytes of another shape differ."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rgb).data, rgb.shape[1])
