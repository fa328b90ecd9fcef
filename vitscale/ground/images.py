"""Stored images: headers, checksums, decoding, operations on pixels, and whether an image is good; the C in `native/`.

Training, conversion, verification, de-duplication and contact sheets all call this module, so that they cannot disagree
about an image. Calls release the interpreter's lock. They raise RecipeError if the C library is not compiled.
"""

import ctypes
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from vitscale.ground import native

OK, CRC_MISMATCH, REFUSED, WRONG_SIZE, NO_MEMORY = range(5)
"""Status of an image: it was decoded to its end without a warning; its bytes do not match their checksum; it is damaged
or of a kind that is not accepted; its size is not the stated one; or memory ran out."""

SUBSAMPLING = "4:4:4"  # chroma subsampling of what `encode` writes: none
MAX_SIDE = 65500  # pixels; libjpeg's limit for reading and writing, less than the format's 65535


class Code(IntEnum):
    """The operations on pixels, each replacing Pillow's of that name, and the meaning of an instruction's values."""

    NOTHING = 0
    INVERT = 1
    SOLARIZE = 2  # the threshold: values from it on are inverted
    SOLARIZE_ADD = 3  # what is added to values below 128
    POSTERIZE = 4  # the number of bits kept; 8 and more keep all
    AUTOCONTRAST = 5
    EQUALIZE = 6
    COLOR = 7  # the factor of ImageEnhance, as for the next three; 0 is gray
    CONTRAST = 8
    BRIGHTNESS = 9  # then the gray value that it blends with: 0, as ImageEnhance, is black
    SHARPNESS = 10
    AFFINE = 11  # a, b, c, d, e, f of Image.transform; interpolation and fill
    CUTOUT = 12  # first row, first column, end of the rows, end of the columns; fill
    BLUR = 13  # the radius of ImageFilter.GaussianBlur, which is its standard deviation
    HUE = 14  # what is added to the hue of mode HSV, 0 to 255, which are a turn
    KERNEL = 15  # pixels on each side of the middle, then the weights from the middle outwards, in units of 2^-12


class Interpolation(IntEnum):
    """How an affine transform interpolates between pixels."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


class Resize(IntEnum):
    """How a crop is resized to the model's input.

    AREA takes the mean over the area that each output pixel covers. TF_BILINEAR interpolates between the two nearest
    pixels each way, however much the picture shrinks, as TensorFlow does by default. The other two are Pillow's
    antialiased kernels.
    """

    AREA = 0
    TF_BILINEAR = 1
    PIL_BILINEAR = 2
    PIL_BICUBIC = 3


INSTRUCTION = np.dtype(
    [("code", np.int32), ("interpolation", np.int32), ("fill", np.int32, 3), ("spare", np.int32), ("values", "f8", 6)]
)
"""One operation, in C's layout. Programs are arrays (B, L) of instructions: L for each picture, applied in order."""

Bytes = bytes | bytearray | memoryview | np.ndarray


class Header(NamedTuple):
    """A JPEG's own header.

    For kinds that libjpeg does not read at all, only the marker is known; the rest is 0.

    Attributes:
        marker: the second byte of its frame marker.
        precision: bits per component.
        height, width: pixels.
        has_exif: whether it has segments that may contain EXIF or XMP data.
    """

    marker: int
    precision: int
    height: int
    width: int
    has_exif: bool = False

    @property
    def refusal(self) -> str | None:
        """Why such a JPEG is never decoded, whatever other programs do with it; None for ordinary ones."""
        kind = f"SOF{self.marker - 0xC0}"
        if self.marker == 0xF7:
            return "JPEG-LS (SOF55), which is another format: convert it first"
        if self.marker in (0xC9, 0xCA):
            return f"arithmetic-coded JPEG ({kind}): jpegtran turns it into an ordinary JPEG without loss"
        if self.marker in (0xCB, 0xCD, 0xCE, 0xCF):
            return f"arithmetic-coded JPEG ({kind}): convert it first"
        if self.marker in (0xC5, 0xC6, 0xC7, 0xDE):
            return "hierarchical JPEG: convert it first"
        if self.marker == 0xC3:
            return f"lossless JPEG ({kind}): convert it first"
        if self.precision != 8:
            return f"{self.precision}-bit JPEG ({kind}); 8 bits are taken: convert it first"
        return None


def read_header(jpeg: Bytes) -> Header | None:
    """The header of a JPEG file; None if there is none. Damage behind its start of frame goes unnoticed.

    Raises ValueError for a header of more than 10,000 segments or, unless the first frame is of a kind that is refused
    anyway, with two frames.
    """
    found = _header(jpeg)
    header = Header(found.marker, found.precision, found.height, found.width, bool(found.has_exif))
    if found.is_endless:
        raise ValueError("a JPEG header of more than 10,000 segments")
    if found.two_frames and header.refusal is None:
        raise ValueError("a JPEG header with two frames")
    return header if header.marker else None


def states_size(jpeg: Bytes, height: int, width: int) -> bool:
    """Whether a file is a JPEG whose own header has this size in pixels; a checksum of its bytes does not tell that."""
    found = _header(jpeg)
    return (found.height, found.width) == (height, width) and not found.two_frames


def check(jpeg: Bytes, height: int, width: int) -> int:
    """The status of decoding a whole JPEG of this size, without keeping its pixels. Raises MemoryError."""
    return _decode(jpeg, height, width, False, None)


def decode(jpeg: Bytes, height: int, width: int, exact: bool = False) -> tuple[int, np.ndarray]:
    """Decode a whole JPEG.

    Args:
        jpeg: the file's bytes.
        height, width: its stated size in pixels.
        exact: use the exact DCT, as most programs do; training and FFCV use the fast one.

    Returns:
        The status, and the pixels, uint8 (height, width, 3) RGB, which are meaningful only if the status is OK.

    Raises MemoryError, which says nothing about the image.
    """
    rgb = np.empty((height, width, 3), np.uint8)
    return _decode(jpeg, height, width, exact, rgb.ctypes.data), rgb


def encode(rgb: np.ndarray, quality: int) -> bytes:
    """Encode a baseline JPEG without metadata or chroma subsampling. Equal pixels give equal bytes.

    Args:
        rgb: the pixels, uint8 (height, width, 3), with sides of 1 to `MAX_SIDE`.
        quality: libjpeg's quality, 1 to 100.

    Raises ValueError for other sides, and MemoryError.
    """
    height, width, channels = rgb.shape
    assert channels == 3 and rgb.dtype == np.uint8, (rgb.shape, rgb.dtype)
    pixels = np.ascontiguousarray(rgb)
    # libjpeg-turbo's own worst case (tjBufSize); only the part that is written takes memory.
    file = np.empty(6 * (-(-width // 8) * 8) * (-(-height // 8) * 8) + 2048, np.uint8)
    size = ctypes.c_uint64(file.size)
    status = native.load().vitscale_encode(pixels.ctypes.data, height, width, quality, file.ctypes.data, size)
    if _known(status) != OK:
        raise ValueError(f"libjpeg does not write {height} x {width} pixels at quality {quality}")
    return file[: size.value].tobytes()


def crc32c(data: Bytes) -> int:
    """CRC-32C of a buffer of bytes, in [0, 2**32)."""
    source = _bytes(data)
    return int(native.load().vitscale_crc32c(source.ctypes.data, source.size))


def decode_slice(
    stored: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    crcs: np.ndarray,
    checked: np.ndarray,
    raw: np.ndarray,
    heights: np.ndarray,
    widths: np.ndarray,
    boxes: np.ndarray,
    flips: np.ndarray,
    may_scale: bool,
    outs: Sequence[np.ndarray],
    resizes: Sequence[Resize],
    status: np.ndarray,
) -> None:
    """The loader's core: stored bytes -> checked, decoded, cropped, resized, flipped pixels of V views of B samples.

    An image is decoded once for all its views, and only as far as their crops need: a damaged image may have good
    crops, a good image has no bad one. Pixels of a view are the same whatever other views are cut beside it.

    Args:
        stored: the samples' stored bytes, uint8 (bytes,), sample b at [starts[b], starts[b] + sizes[b]).
        starts, sizes: positions and sizes in bytes, int64 (B,).
        crcs: CRC-32C of each sample's stored bytes, uint32 (B,).
        checked: whether the checksum is compared, bool (B,).
        raw: whether the stored bytes are raw pixels instead of a JPEG, bool (B,).
        heights, widths: size of the stored picture in pixels, int64 (B,).
        boxes: each crop's top, left, height and width in pixels, int32 (B, V, 4).
        flips: whether the crop is flipped horizontally, bool (B, V).
        may_scale: whether the decoder may halve a picture that is large enough for all views, if they are resized by
            AREA.
        outs: the result by kinds of views, uint8 (B, n, S, S, 3) each, whose n add up to V; zeros where the status is
            not OK.
        resizes: how the crops of each kind are resized.
        status: the result's status, int32 (B,); one that is not OK beforehand is kept.
    """
    count = len(status)
    places = [(out, n, resize) for out, resize in zip(outs, resizes, strict=True) for n in range(out.shape[1])]
    kinds = [np.int64, np.int64, np.uint32, bool, bool, np.int64, np.int64, np.int32, bool]
    shapes = [*[(count,)] * 7, (count, len(places), 4), (count, len(places))]
    given = (starts, sizes, crcs, checked, raw, heights, widths, boxes, flips)
    columns = [np.ascontiguousarray(column, kind) for column, kind in zip(given, kinds, strict=True)]
    assert [column.shape for column in columns] == shapes and len(places) > 0, [column.shape for column in columns]
    for out in outs:
        assert out.dtype == np.uint8 and out.ndim == 5 and out.flags.c_contiguous
        assert out.shape == (count, out.shape[1], out.shape[2], out.shape[2], 3), out.shape
    assert stored.dtype == np.uint8 and stored.ndim == 1 and stored.flags.c_contiguous
    assert status.dtype == np.int32 and status.shape == (count,) and status.flags.c_contiguous
    # One row for each view: side, filter, address in the first sample, bytes from one sample to the next.
    views = np.array(
        [
            (out.shape[2], resize, out.ctypes.data + n * out.shape[2] ** 2 * 3, math.prod(out.shape[1:]))
            for out, n, resize in places
        ],
        np.int64,
    ).T.copy()
    native.load().vitscale_decode_slice(
        *(stored.ctypes.data, stored.size, count),
        *(column.ctypes.data for column in columns),
        *(len(places), *(row.ctypes.data for row in views), may_scale, status.ctypes.data),
    )


def operate(pixels: np.ndarray, programs: np.ndarray, status: np.ndarray) -> None:
    """Change decoded pictures in place, each by its own program.

    Whatever Pillow computes in integers or in float32 has the same result to the last bit; affine transforms other than
    NEAREST differ from Pillow's by at most one grey value.

    Args:
        pixels: the pictures, uint8 (B, S, S, 3), with S at most 8192.
        programs: their programs, INSTRUCTION (B, L), with values between -32768 and 32768, those of SOLARIZE,
            SOLARIZE_ADD and POSTERIZE not negative, KERNEL's of a kernel that fits and sums to 2^12 at most.
        status: their status, int32 (B,); a picture whose status is not OK stays as it is.

    Raises MemoryError; ValueError, with no picture changed, for any other programs or sides.
    """
    count, side = pixels.shape[:2]
    assert pixels.dtype == np.uint8 and pixels.shape == (count, side, side, 3) and pixels.flags.c_contiguous
    assert programs.dtype == INSTRUCTION and programs.shape[:1] == (count,) and programs.flags.c_contiguous
    assert status.dtype == np.int32 and status.shape == (count,) and status.flags.c_contiguous
    given = (pixels.ctypes.data, count, side, programs.ctypes.data, programs.shape[1], status.ctypes.data)
    if _known(native.load().vitscale_operate(*given)) == REFUSED:
        raise ValueError(f"expected a side from 1 to 8192 and known codes, their values in range; got a side of {side}")


def _header(jpeg: Bytes) -> native.Header:
    found, source = native.Header(), _bytes(jpeg)
    _known(native.load().vitscale_header(source.ctypes.data, source.size, found))
    return found


def _decode(jpeg: Bytes, height: int, width: int, exact: bool, pixels: int | None) -> int:
    source = _bytes(jpeg)
    return _known(native.load().vitscale_decode(source.ctypes.data, source.size, height, width, exact, pixels))


def _known(status: int) -> int:
    if status == NO_MEMORY:
        raise MemoryError("no memory to decode, change or encode an image")
    return status


def _bytes(data: Bytes) -> np.ndarray:
    """The same memory as an array of contiguous bytes, uint8 (bytes,)."""
    return np.frombuffer(data, np.uint8)
