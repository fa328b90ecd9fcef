"""One image file's bytes -> what is stored: the same bytes, a fresh JPEG, or a reason why not.

A JPEG that stands upright and that FFCV's decoder takes without complaint passes byte for byte, so that a complaint
at training time always means damage. Everything else that Pillow reads becomes an RGB JPEG of high quality.
"""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from vitscale.shards import jpeg
from vitscale.shards.beton import MAX_SIDE

JPEG_QUALITY = 95
JPEG_SUBSAMPLING = "4:4:4"
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb: 256 MiB of RGB
MAX_FILE_BYTES = 1 << 30

# EXIF orientation -> what makes it upright
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


@dataclass(frozen=True)
class StoredImage:
    """A JPEG as it is stored, its size in pixels, and whether these are the source's own bytes."""

    jpeg: bytes
    height: int
    width: int
    passed_through: bool


@dataclass(frozen=True)
class Reject:
    """Why an image cannot be stored; a reason depends on the file's bytes only."""

    reason: str


def store_image(data: bytes) -> StoredImage | Reject:
    """Turn an image file's bytes into what is stored. Never raises, whatever the bytes are.

    First frame of animations; EXIF orientation applied; alpha onto white; 16 bits scaled to 8; palette, gray, CMYK and
    YCCK to RGB. Colour profiles are not applied.
    """
    if not data:
        return Reject("empty file (0 bytes)")
    if len(data) > MAX_FILE_BYTES:
        return Reject(f"{len(data):,} bytes; at most {MAX_FILE_BYTES:,} are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs (limited below), of odd metadata
            return _store(data)
    except UnidentifiedImageError:
        return Reject(f"not an image that Pillow knows; the file begins with {data[:8]!r}")
    except MemoryError:
        return Reject("not enough memory to decode it")
    # Pillow's plugins raise nearly anything on damaged files: OSError, SyntaxError, ValueError, struct.error, KeyError.
    except Exception as error:
        return Reject(f"cannot be decoded: {type(error).__name__}: {error}")


def _store(data: bytes) -> StoredImage | Reject:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            return Reject(f"{width} x {height} pixels; at most {MAX_PIXELS:,} are taken")
        if max(width, height) > MAX_SIDE or min(width, height) < 1:
            return Reject(f"{width} x {height} pixels; a side has 1 to {MAX_SIDE}")
        # MPO: a JPEG with further pictures behind it, as many cameras write it.
        if image.format in ("JPEG", "MPO") and _turn(image) is None:
            status, _ = jpeg.decode(data, height, width)
            if status == 0:
                return StoredImage(data, height, width, passed_through=True)
        with _silence(image.format == "TIFF"):
            image.load()
        rgb = _to_rgb(image)
        # Only now: asked for EXIF before, a damaged PNG loads in part, and then no longer tells that it is damaged.
        turn = _turn(image)
        if turn is not None:
            rgb = rgb.transpose(turn)
    return _encode(rgb)


def _encode(rgb: Image.Image) -> StoredImage | Reject:
    out = io.BytesIO()
    rgb.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=JPEG_SUBSAMPLING, comment=b"")
    status, _ = jpeg.decode(out.getvalue(), rgb.height, rgb.width)
    if status != 0:
        return Reject(f"the decoder refuses its own format (status {status})")
    return StoredImage(out.getvalue(), rgb.height, rgb.width, passed_through=False)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What the EXIF data, if there are any that can be read, ask for; None where the image stands upright."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged metadata are no reason to lose an image
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB. Raises ValueError for pixels without a defined range."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits, which Pillow itself would clip. Its one transparent value becomes white."""
    gray = np.asarray(image).astype(np.int64)
    if gray.min() < 0 or gray.max() > 65535:
        raise ValueError("32-bit pixels have no defined range")
    scaled = ((gray + 128) // 257).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled[gray == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")


@contextmanager
def _silence(active: bool) -> Iterator[None]:
    """libtiff writes to the process's stderr; there it would tear the progress bar. The reason is raised as well."""
    if not active:
        yield
        return
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
