"""JPEG files: what their header says, and writing them.

Pillow does not say how a JPEG is coded, and takes another size than libjpeg from some damaged headers; hence the header
is read here as well, by the rules of libjpeg (ITU-T T.81, annex B). Pixels are read and written by the library that
FFCV decodes with, without Pillow's padding to 4 bytes a pixel: a sixth faster than through Pillow, and the same bytes.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

import vitscale.shards.jpeg  # noqa: F401  what it loads is used below
from vitscale.errors import RecipeError

SUBSAMPLING = "4:4:4"
MAX_SIDE = 65500  # pixels; what libjpeg reads and writes, less than the format's 65535
_MAX_SEGMENTS = 10_000

_EOI, _SOS, _DHP, _APP1, _SOF_LS = 0xD9, 0xDA, 0xDE, 0xE1, 0xF7
_NO_SOF = (0xC4, 0xC8, 0xCC)  # DHT, JPG, DAC lie among the start-of-frame markers
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))  # TEM, RST0 to RST7, SOI


class Frame(NamedTuple):
    """A JPEG's start of frame: its marker's second byte, bits a component, size in pixels.

    `has_exif`: whether the header has segments that may hold EXIF or XMP data.
    """

    marker: int
    precision: int
    height: int
    width: int
    has_exif: bool = False

    @property
    def refusal(self) -> str | None:
        """Why decoders for training refuse such a JPEG, whatever Pillow makes of it; None for ordinary ones."""
        kind = f"SOF{self.marker - 0xC0}"
        if self.marker == _SOF_LS:
            return "JPEG-LS (SOF55), which is another format: convert it first"
        if self.marker in (0xC9, 0xCA):
            return f"arithmetic-coded JPEG ({kind}): jpegtran turns it into an ordinary JPEG without loss"
        if self.marker in (0xCB, 0xCD, 0xCE, 0xCF):
            return f"arithmetic-coded JPEG ({kind}): convert it first"
        if self.marker in (0xC5, 0xC6, 0xC7, _DHP):
            return "hierarchical JPEG: convert it first"
        if self.marker == 0xC3:
            return f"lossless JPEG ({kind}): convert it first"
        if self.precision != 8:
            return f"{self.precision}-bit JPEG ({kind}); 8 bits are taken: convert it first"
        return None


def read_frame(data: bytes) -> Frame | None:
    """The start of frame of a JPEG file; None if there is none. Whatever lies between segments is skipped.

    Raises ValueError for a header without end or with two frames, unless the first of them is of a kind refused anyway.
    """
    frame: Frame | None = None
    has_exif = False
    position = 2
    for _ in range(_MAX_SEGMENTS):
        position = data.find(b"\xff", position)
        while data[position : position + 1] == b"\xff" and position >= 0:  # any number of them may fill
            position += 1
        if not 0 <= position < len(data):
            break
        marker = data[position]
        position += 1
        if marker == 0 or marker in _WITHOUT_LENGTH:
            continue
        if marker in (_EOI, _SOS):
            break
        if (0xC0 <= marker <= 0xCF and marker not in _NO_SOF) or marker in (_DHP, _SOF_LS):
            if frame is not None:
                raise ValueError("a JPEG header with two frames")
            head = data[position : position + 7]
            if len(head) < 7:
                break
            frame = Frame(marker, head[2], int.from_bytes(head[3:5], "big"), int.from_bytes(head[5:7], "big"))
            if frame.refusal is not None:
                break
        has_exif = has_exif or marker == _APP1
        position += int.from_bytes(data[position : position + 2], "big")
    else:
        raise ValueError(f"a JPEG header of more than {_MAX_SEGMENTS:,} segments")
    return frame and frame._replace(has_exif=has_exif)


# ------------------------------------------------------------------------------------------------- reading and writing

# From turbojpeg.h, unchanged since its version 1.2.
_PIXELS_RGB, _SAMPLES_444 = 0, 0
_NO_REALLOC, _ACCURATE_DCT = 1024, 4096


def _load() -> ctypes.CDLL:
    """libturbojpeg, which FFCV's extension has loaded into this process."""
    try:
        library = ctypes.CDLL("libturbojpeg.so.0")
    except OSError as error:
        raise RecipeError(f"libturbojpeg, which writes the images, cannot be loaded ({error})") from error
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_ulong
    library.tjInitCompress.restype = library.tjInitDecompress.restype = pointer
    library.tjDestroy.argtypes = [pointer]
    library.tjBufSize.argtypes, library.tjBufSize.restype = [number] * 3, size
    library.tjCompress2.argtypes = [
        *(pointer, pointer, number, number, number, number),  # handle, pixels, width, pitch, height, pixel format
        *(ctypes.POINTER(pointer), ctypes.POINTER(size), number, number, number),  # file, its size, samples, quality
    ]
    library.tjDecompress2.argtypes = [
        *(pointer, ctypes.c_char_p, size),  # handle, file, its size
        *(pointer, number, number, number, number, number),  # pixels, width, pitch, height, pixel format
    ]
    return library


_TURBOJPEG = _load()


@contextmanager
def _handle(created: int | None) -> Iterator[int]:
    if not created:
        raise MemoryError
    try:
        yield created
    finally:
        _TURBOJPEG.tjDestroy(created)


def decode_exactly(data: bytes, height: int, width: int) -> np.ndarray | None:
    """Decode one JPEG, whose header states this size, as exactly as libjpeg can: what training decodes with is faster.

    Returns uint8 (height, width, 3) RGB; None if the decoder complains, of damage or of a colour space.
    """
    rgb = np.empty((height, width, 3), np.uint8)
    with _handle(_TURBOJPEG.tjInitDecompress()) as handle:
        status = _TURBOJPEG.tjDecompress2(
            *(handle, data, len(data)), *(rgb.ctypes.data, width, 0, height, _PIXELS_RGB, _ACCURATE_DCT)
        )
    return rgb if status == 0 else None


def encode(rgb: np.ndarray, quality: int) -> bytes:
    """A baseline JPEG without metadata, chroma as fine as luma. Equal pixels give equal bytes.

    Args:
        rgb: uint8 (height, width, 3), sides of 1 to `MAX_SIDE`.
        quality: 1 to 100, as libjpeg scales its tables.

    Raises ValueError if the library refuses, which it has no reason to, and MemoryError.
    """
    height, width, _ = rgb.shape
    pixels = np.ascontiguousarray(rgb)
    size = ctypes.c_ulong(_TURBOJPEG.tjBufSize(width, height, _SAMPLES_444))
    file = np.empty(size.value, np.uint8)  # the worst case; the memory is taken only where it is written to
    address = ctypes.c_void_p(file.ctypes.data)
    with _handle(_TURBOJPEG.tjInitCompress()) as handle:
        status = _TURBOJPEG.tjCompress2(
            *(handle, pixels.ctypes.data, width, 0, height, _PIXELS_RGB),
            *(ctypes.byref(address), ctypes.byref(size), _SAMPLES_444, quality, _NO_REALLOC | _ACCURATE_DCT),
        )
    if status != 0:
        raise ValueError(f"libturbojpeg does not write {height} x {width} pixels at quality {quality}")
    return file[: size.value].tobytes()
