"""Turns an image file's bytes into what is stored: the same bytes, a new JPEG, or the reason why neither is possible.

A JPEG that is upright, small enough and decodes without a warning is stored byte for byte, so a decoder's warning at
training time always means damage. Everything else that Pillow reads becomes an RGB JPEG.
"""

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from vitscale.ground.errors import RecipeError
from vitscale.ground.files.unpacked import most_pixels
from vitscale.ground.images import MAX_SIDE, OK, SUBSAMPLING, Header, decode, encode, read_header

# HEIC is listed although Pillow does not read it: a collection of HEIC files must be reported, not overlooked.
# fmt: off
IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)
# fmt: on
MAX_IMAGE_BYTES = 1 << 30  # of an image file, which has to fit in memory
JPEG_QUALITY = 95
MAX_PIXELS = 89_478_485  # above this Pillow warns of a decompression bomb: 256 MiB of RGB

# EXIF orientation -> the transposition that makes the image upright
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
_JPEG_FORMATS = ("JPEG", "MPO")  # MPO: a JPEG followed by more pictures, as many cameras write it
_DRAWINGS = ("EPS", "WMF", "EMF")  # Pillow needs other programs to render these
_BRANDS_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_BEGINNINGS = (
    (b"%PDF", "a PDF document: extract its images first"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with `git lfs pull`"),
    (b"\xff\x0a", "a JPEG XL image, which Pillow does not read: convert it first"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image, which Pillow does not read: convert it first"),
    (b"PK\x03\x04", "a zip archive: unpack it first"),
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\x1aE\xdf\xa3", "a video: extract its frames first"),
)


class TooLarge(OSError):
    """An image file has more than MAX_IMAGE_BYTES."""


def refuse_too_large(size: int) -> None:
    """Raise TooLarge for a file that is larger than MAX_IMAGE_BYTES."""
    if size > MAX_IMAGE_BYTES:
        raise TooLarge(f"{size:,} bytes; at most {MAX_IMAGE_BYTES:,} are accepted")


@dataclass(frozen=True)
class ImageOptions:
    """How images are stored.

    An image is shrunk until its shorter side has at most `short_side` pixels and its longer side at most `long_side`;
    no image is enlarged. The side that decides gets exactly its limit; the other keeps the aspect ratio, rounded to
    the nearest pixel (halves up), at least 1. Raises RecipeError for values out of range.
    """

    short_side: int | None = None  # in pixels; None for no limit
    long_side: int | None = None
    quality: int = JPEG_QUALITY  # of new JPEGs, 1 to 100
    pass_through: bool = True  # whether a JPEG that can be stored unchanged keeps its bytes

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 100:
            raise RecipeError(f"a JPEG quality of {self.quality}; expected 1 to 100")
        for name, limit in (("short", self.short_side), ("long", self.long_side)):
            if limit is not None and limit < 1:
                raise RecipeError(f"images with a {name} side of at most {limit} pixels; expected at least 1")

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels at which an image of this size is stored."""
        limited = [(min(width, height), self.short_side), (max(width, height), self.long_side)]
        reductions = [(limit, side) for side, limit in limited if limit is not None and limit < side]
        if not reductions:
            return width, height
        limit, side = min(reductions, key=lambda reduction: reduction[0] / reduction[1])
        return max(1, _rounded(width * limit, side)), max(1, _rounded(height * limit, side))

    def described(self) -> dict[str, Any]:
        """The options that change a dataset's content, for its manifest."""
        limits = {"short_side": self.short_side, "long_side": self.long_side}
        return {
            "jpeg_quality": self.quality,
            "jpeg_subsampling": SUBSAMPLING,
            "pass_through": self.pass_through,
            **{name: limit for name, limit in limits.items() if limit is not None},
        }


def _rounded(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


_DEFAULTS = ImageOptions()


@dataclass(frozen=True)
class StoredImage:
    """A stored JPEG of this size in pixels."""

    jpeg: bytes
    height: int
    width: int
    passed_through: bool  # whether the bytes are the source's own
    # uint8 (height, width, 3), before encoding if the JPEG is new. Not compared: equal JPEGs show the same.
    pixels: np.ndarray = field(compare=False, repr=False)


class Reject(NamedTuple):
    """Why an image cannot be stored; depends only on the file's bytes and the options."""

    reason: str


def store_image(data: bytes, options: ImageOptions = _DEFAULTS) -> StoredImage | Reject:
    """Turn an image file's bytes into what is stored.

    Takes the first frame of an animation, applies the EXIF orientation, puts alpha onto white, scales 16 bits to 8,
    and converts palette, gray, CMYK and YCCK to RGB (CMYK as Adobe stores it, inverted). Colour profiles are ignored.

    Raises MemoryError, and RecipeError as `vitscale.ground.images` does: neither is the image's fault. Nothing else is
    raised, whatever the bytes are.
    """
    if not data:
        return Reject("empty file (0 bytes)")
    try:
        refuse_too_large(len(data))
        header = read_header(data) if data.startswith(b"\xff\xd8\xff") else None
        if header is not None and header.refusal is not None:
            return Reject(header.refusal)
        # Most collections consist of such JPEGs, and they need no Pillow.
        if header is not None and not header.has_exif:
            passed = _passed(data, header.height, header.width, options)
            if passed is not None:
                return passed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bombs (limited below) and odd metadata
            return _store(data, header, options)
    except TooLarge as error:
        return Reject(str(error))
    except UnidentifiedImageError:
        return Reject(_explain(data))
    except Image.DecompressionBombError as error:
        return Reject(f"too large: {error}")
    except (MemoryError, RecipeError):  # not the image's fault
        raise
    # Pillow's plugins raise almost anything on damaged files: OSError, SyntaxError, ValueError, struct.error, KeyError.
    except Exception as error:
        return Reject(f"cannot be decoded: {type(error).__name__}: {error}")


def pixels_of(image: Image.Image) -> np.ndarray | Reject:
    """An open image's pixels as stored, uint8 (height, width, 3), or why they cannot be. Raises MemoryError."""
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        return Reject(f"{width} x {height} pixels; 1 to {MAX_PIXELS:,} are accepted")
    if max(width, height) > MAX_SIDE:
        return Reject(f"{width} x {height} pixels; a side must have 1 to {MAX_SIDE}")
    try:
        rgb, turn = _to_rgb(image), _turn(image)
        return np.asarray(rgb if turn is None else rgb.transpose(turn))
    except MemoryError:
        raise
    except Exception as error:  # as in `store_image`: an image is decoded when its pixels are asked for
        return Reject(f"cannot be decoded: {type(error).__name__}: {error}")


def _passed(data: bytes, height: int, width: int, options: ImageOptions) -> StoredImage | None:
    """An upright JPEG of this size, unchanged; None if it cannot be stored unchanged."""
    is_fitting = options.fitted(width, height) == (width, height)
    if not options.pass_through or not is_fitting or _limits(data, height, width, options) is not None:
        return None
    status, pixels = decode(data, height, width)
    return StoredImage(data, height, width, passed_through=True, pixels=pixels) if status == OK else None


def _limits(data: bytes, height: int, width: int, options: ImageOptions) -> str | None:
    """Why a picture of this size cannot be stored, or None."""
    fitted = options.fitted(width, height)
    most = min(MAX_PIXELS, most_pixels(len(data)))
    if width * height > most:
        of_so_few = f" in {len(data):,} bytes" if most < MAX_PIXELS else ""
        return f"{width} x {height} pixels; at most {most:,} are accepted{of_so_few}"
    if max(fitted) > MAX_SIDE or min(width, height) < 1:
        return f"{width} x {height} pixels; a side must have 1 to {MAX_SIDE}"
    return None


def _store(data: bytes, header: Header | None, options: ImageOptions) -> StoredImage | Reject:
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        if image.format in _DRAWINGS:
            return Reject(f"a drawing ({image.format}): render it first")
        if (reason := _limits(data, height, width, options)) is not None:
            return Reject(reason)
        if image.format not in _JPEG_FORMATS:
            with _silence(image.format == "TIFF"):
                image.load()
            rgb = _to_rgb(image)
            # Not the size at opening: Pillow turns a TIFF upright on loading.
            rgb = _resized(rgb, options.fitted(*rgb.size))
            # EXIF is read last: once asked for it, Pillow loads a damaged PNG in part and no longer reports the damage.
            return _encoded(rgb, _turn(image), options)
        if header is not None and (header.width, header.height) != (width, height):
            return Reject(f"its header contradicts itself: {width} x {height} pixels in one place, not in another")
        return _store_jpeg(data, image, options)


def _store_jpeg(data: bytes, image: Image.Image, options: ImageOptions) -> StoredImage:
    width, height = image.size
    fitted = options.fitted(width, height)
    turn = _turn(image)
    box = None
    if turn is None and (passed := _passed(data, height, width, options)) is not None:
        return passed
    if fitted == (width, height):
        status, pixels = decode(data, height, width, exact=True)
        if status == OK:
            return _encoded(pixels, turn, options)
    else:
        # The decoder shrinks by 2, 4 or 8 almost for free; at twice the target a better filter takes over.
        drafted = image.draft(None, (2 * fitted[0], 2 * fitted[1]))
        box = drafted[1] if drafted else None
    return _encoded(_resized(_to_rgb(image), fitted, box), turn, options)


def _encoded(rgb: Image.Image | np.ndarray, turn: Image.Transpose | None, options: ImageOptions) -> StoredImage:
    if turn is not None:
        rgb = (Image.fromarray(rgb) if isinstance(rgb, np.ndarray) else rgb).transpose(turn)
    pixels = np.asarray(rgb)
    height, width, _ = pixels.shape
    return StoredImage(encode(pixels, options.quality), height, width, passed_through=False, pixels=pixels)


def _resized(
    rgb: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float] | None = None
) -> Image.Image:
    """The image shrunk to `size` (width, height) by an antialiased bicubic filter; only its `box`, if given."""
    if rgb.size == size:
        return rgb
    # First averages whole blocks of pixels, but never below twice the target size.
    return rgb.resize(size, Image.Resampling.BICUBIC, box, reducing_gap=2.0)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The transposition that the EXIF data ask for; None if the image is upright or the data cannot be read."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged metadata is no reason to lose an image
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, whatever its mode. Raises ValueError if its pixels have no defined range."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """A 16-bit gray image in RGB; Pillow's own conversion would clip. The transparent value, if any, becomes white."""
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
    """Discards stderr: libtiff writes there, which would break the progress bar. Its errors are raised, too."""
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


def _explain(data: bytes) -> str:
    """The likely reason why Pillow does not recognise a file."""
    head = data[:1024]
    for beginning, what in _BEGINNINGS:
        if head.startswith(beginning):
            return what
    if head[4:8] == b"ftyp":
        if head[8:12] in _BRANDS_HEIF:
            return "a HEIC image, which Pillow does not read: convert it first, for example with heif-convert"
        if not head[8:12].startswith(b"avi"):
            return "a video: extract its frames first"
    if not head.strip(b"\0"):
        return "nothing but zero bytes: fetch or copy the file again"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in text and text.startswith(b"<"):
        return "an SVG drawing: render it first"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "a web page, probably an error that was saved in the image's place: fetch it again"
    if text.startswith((b"<", b"{")):
        return f"text, not an image; the file begins with {head[:32]!r}"
    return f"not an image that Pillow knows; the file begins with {head[:8]!r}"
