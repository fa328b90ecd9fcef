"""Stored images: headers, checksums, pixels, operations on pixels, and whether an image is good; the C in `native/`.

Training, conversion, verification, de-duplication and contact sheets all call this module, so that they cannot disagree
about an image. Calls release the interpreter's lock. They raise RecipeError where the C is not compiled.
"""

import ctypes
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from vitscale import native

OK, CRC_MISMATCH, REFUSED, WRONG_SIZE, NO_MEMORY = range(5)
"""What becomes of an image: it is decoded to its end without a warning; its bytes are not those of its checksum; it is
damaged, or of a kind that is not taken; it is of another size than stated; or memory ran out."""

SUBSAMPLING = "4:4:4"  # of what `encode` writes
MAX_SIDE = 65500  # pixels; what libjpeg reads and writes, less than the format's 65535


class Code(IntEnum):
    """The operations on pixels, each in place of Pillow's of that name, and what the values of an instruction are."""

    NOTHING = 0
    INVERT = 1
    SOLARIZE = 2  # from which value on
    SOLARIZE_ADD = 3  # what is added to values below 128
    POSTERIZE = 4  # how many bits stay; 8 and more: all
    AUTOCONTRAST = 5
    EQUALIZE = 6
    COLOR = 7  # the factor of ImageEnhance, and so below; 0 is gray
    CONTRAST = 8
    BRIGHTNESS = 9
    SHARPNESS = 10
    AFFINE = 11  # a, b, c, d, e, f of Image.transform; interpolation and fill
    CUTOUT = 12  # first row, first column, end of the rows, end of the columns; fill
    BLUR = 13  # the radius of ImageFilter.GaussianBlur, which is its standard deviation


class Interpolation(IntEnum):
    """How an affine transform finds values between pixels."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


class Resize(IntEnum):
    """How a part of a picture becomes the model's input.

    By the mean over the area that each pixel covers; between the two nearest pixels each way, however much the picture
    shrinks, as TensorFlow does unless it is told otherwise; or as Pillow does, with its antialiased kernels.
    """

    AREA = 0
    TF_BILINEAR = 1
    PIL_BILINEAR = 2
    PIL_BICUBIC = 3


INSTRUCTION = np.dtype(
    [("code", np.int32), ("interpolation", np.int32), ("fill", np.int32, 3), ("spare", np.int32), ("values", "f8", 6)]
)
"""One operation, as C has it. Programs are arrays (B, L) of them: for each picture L, one after the other."""

Bytes = bytes | bytearray | memoryview | np.ndarray


class Header(NamedTuple):
    """What a JPEG says of itself: its frame marker's second byte, bits a component, size in pixels.

    `has_exif`: whether it has segments that may hold EXIF or XMP data. Of kinds that libjpeg does not read at all, only
    the marker is known; the rest is 0.
    """

    marker: int
    precision: int
    height: int
    width: int
    has_exif: bool = False

    @property
    def refusal(self) -> str | None:
        """Why such a JPEG is never decoded, whatever other programs make of it; None for ordinary ones."""
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
    """The header of a JPEG file; None if there is none. Damage behind its start of frame does not matter here.

    Raises ValueError for a header without end or with two frames, unless the first of them is of a kind refused anyway.
    """
    found = _header(jpeg)
    header = Header(found.marker, found.precision, found.height, found.width, bool(found.has_exif))
    if found.is_endless:
        raise ValueError("a JPEG header of more than 10,000 segments")
    if found.two_frames and header.refusal is None:
        raise ValueError("a JPEG header with two frames")
    return header if header.marker else None


def states_size(jpeg: Bytes, height: int, width: int) -> bool:
    """Whether a file is a JPEG of this size in pixels by its own header. A checksum covers the stored bytes alone."""
    found = _header(jpeg)
    return (found.height, found.width) == (height, width) and not found.two_frames


def check(jpeg: Bytes, height: int, width: int) -> int:
    """The status of decoding a whole JPEG of this size, whose pixels are not wanted. Raises MemoryError."""
    return _decode(jpeg, height, width, False, None)


def decode(jpeg: Bytes, height: int, width: int, exact: bool = False) -> tuple[int, np.ndarray]:
    """Decode a whole JPEG.

    Args:
        jpeg: the file's bytes.
        height, width: the size in pixels that it is said to have.
        exact: by the exact DCT, as most programs do; training and FFCV use the fast one.

    Returns:
        the status, and the pixels, uint8 (height, width, 3) RGB, meaningful only if it is OK.

    Raises MemoryError, which says nothing about the image.
    """
    rgb = np.empty((height, width, 3), np.uint8)
    return _decode(jpeg, height, width, exact, rgb.ctypes.data), rgb


def encode(rgb: np.ndarray, quality: int) -> bytes:
    """A baseline JPEG without metadata, chroma as fine as luma. Equal pixels give equal bytes.

    Args:
        rgb: uint8 (height, width, 3), sides of 1 to `MAX_SIDE`.
        quality: 1 to 100, as libjpeg scales its tables.

    Raises ValueError for other sides, and MemoryError.
    """
    height, width, channels = rgb.shape
    assert channels == 3 and rgb.dtype == np.uint8, (rgb.shape, rgb.dtype)
    pixels = np.ascontiguousarray(rgb)
    # libjpeg-turbo's own worst case (tjBufSize); memory is taken only where it is written to.
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
    out: np.ndarray,
    status: np.ndarray,
    resize: Resize = Resize.AREA,
) -> None:
    """The loader's heart: stored bytes -> checked, decoded, cropped, resized, flipped pixels of B samples.

    A view is decoded only as far as it needs: a damaged image may have good views, a good image has no bad one.

    Args:
        stored: uint8, the samples' stored bytes, sample b at [starts[b], starts[b] + sizes[b]).
        starts, sizes: int64 (B,).
        crcs: uint32 (B,), CRC-32C of each sample's stored bytes.
        checked: bool (B,), whether it is compared.
        raw: bool (B,), whether the stored bytes are pixels, not a JPEG.
        heights, widths: int64 (B,), size of the stored picture.
        boxes: int32 (B, 4), top, left, height, width of what is seen.
        flips: bool (B,).
        may_scale: whether the decoder may halve a picture that is large enough, and is resized by area.
        out: uint8 (B, S, S, 3), the result; zeros where the status is not OK.
        status: int32 (B,); a sample that comes with another status than OK stays as it is.
        resize: how what is seen gets its size.
    """
    count, side = out.shape[:2]
    kinds = [np.int64, np.int64, np.uint32, bool, bool, np.int64, np.int64, np.int32, bool]
    given = (starts, sizes, crcs, checked, raw, heights, widths, boxes, flips)
    columns = [np.ascontiguousarray(column, kind) for column, kind in zip(given, kinds, strict=True)]
    assert all(column.shape == ((count, 4) if column is columns[7] else (count,)) for column in columns)
    assert stored.dtype == out.dtype == np.uint8 and stored.ndim == 1 and out.shape == (count, side, side, 3)
    assert status.dtype == np.int32 and status.shape == (count,)
    assert stored.flags.c_contiguous and out.flags.c_contiguous and status.flags.c_contiguous
    native.load().vitscale_decode_slice(
        *(stored.ctypes.data, stored.size, count),
        *(column.ctypes.data for column in columns),
        *(may_scale, resize, out.ctypes.data, side, status.ctypes.data),
    )


def operate(pixels: np.ndarray, programs: np.ndarray, status: np.ndarray) -> None:
    """Change decoded pictures in place, each by its own program.

    Whatever Pillow computes in whole numbers or in float32 has its result to the last bit; affine transforms that are
    not NEAREST differ from Pillow's by one grey value at most.

    Args:
        pixels: uint8 (B, S, S, 3).
        programs: INSTRUCTION (B, L), values between -32768 and 32768.
        status: int32 (B,); a picture whose status is not OK stays as it is.

    Raises MemoryError.
    """
    count, side = pixels.shape[:2]
    assert pixels.dtype == np.uint8 and pixels.shape == (count, side, side, 3) and pixels.flags.c_contiguous
    assert programs.dtype == INSTRUCTION and programs.shape[:1] == (count,) and programs.flags.c_contiguous
    assert status.dtype == np.int32 and status.shape == (count,) and status.flags.c_contiguous
    call = native.load().vitscale_operate
    _known(call(pixels.ctypes.data, count, side, programs.ctypes.data, programs.shape[1], status.ctypes.data))


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
    """The same memory as an array of bytes that lie side by side."""
    return np.frombuffer(data, np.uint8)
