"""FFCV's JPEG decoder and resizer as functions for compiled kernels, without importing the `ffcv` package.

Importing `ffcv` brings torch, OpenCV's Python module and seconds of start-up; only two C functions of its extension
are needed. They are registered with LLVM under names of our own, by address: `imdecode` and `resize` are too common to
be looked up among all symbols of a process.

    c_imdecode(jpeg, jpeg_bytes, height, width, out, crop_height, crop_width, offset_x, offset_y, scale_num,
               scale_denom, enable_crop, flip) -> int32      0: clean; anything else: damaged, unsupported or warned
    c_resize(0, source, height, width, first_row, end_row, first_col, end_col, out, out_height, out_width)

Pixels are uint8 RGB, rows packed; addresses are integers. For a plain decode: crop size = image size, offsets 0, scale
1/1, no crop, no flip. `c_resize` is OpenCV's INTER_AREA of the given rectangle. Both are safe in threads.
"""

import ctypes
import importlib.util
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from numba import njit, types

from vitscale.errors import RecipeError

_SYSTEM_PACKAGES = "sudo apt-get install -y g++ pkg-config libopencv-dev libturbojpeg0-dev"
_INSTALL = f"{_SYSTEM_PACKAGES} && pip install ffcv==1.0.2"


def _find_library() -> Path:
    """FFCV's C extension. Raises RecipeError where FFCV is not installed."""
    spec = importlib.util.find_spec("ffcv")  # locates the package, does not run it
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(library for folder in folders for library in Path(folder).glob("_libffcv*.so"))
    if not found:
        raise RecipeError(f"FFCV, which decodes the images, is not installed. Install it with: {_INSTALL}")
    return found[0]


def _register(library: Path) -> None:
    """Make the two C functions known to LLVM as vitscale_imdecode and vitscale_resize."""
    try:
        loaded = ctypes.CDLL(str(library))
        for name in ("imdecode", "resize"):
            address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
            llvm.add_symbol(f"vitscale_{name}", address)
    except (OSError, AttributeError) as error:
        raise RecipeError(f"FFCV's {library} cannot be loaded ({error}). Install it with: {_INSTALL}") from error


_register(_find_library())

c_imdecode = types.ExternalFunction(
    "vitscale_imdecode",
    types.int32(
        types.uintp,
        types.uint64,
        types.uint32,
        types.uint32,
        types.uintp,
        types.uint32,
        types.uint32,
        types.uint32,
        types.uint32,
        types.uint32,
        types.uint32,
        types.boolean,
        types.boolean,
    ),
)
c_resize = types.ExternalFunction("vitscale_resize", types.void(*([types.int64] * 11)))


@njit(nogil=True, cache=True)
def decode_into(jpeg, jpeg_bytes, height, width, out):
    """A plain decode between addresses, callable from compiled code. `out` has room for height x width x 3 bytes."""
    return c_imdecode(  # type: ignore[call-overload]
        np.uintp(jpeg),
        np.uint64(jpeg_bytes),
        np.uint32(height),
        np.uint32(width),
        np.uintp(out),
        np.uint32(height),
        np.uint32(width),
        np.uint32(0),
        np.uint32(0),
        np.uint32(1),
        np.uint32(1),
        False,
        False,
    )


def decode(jpeg: bytes | np.ndarray, height: int, width: int) -> tuple[int, np.ndarray]:
    """Decode one JPEG as training will.

    Args:
        jpeg: the file's bytes (bytes, or a contiguous uint8 array).
        height, width: the size in pixels that the JPEG's own header states.

    Returns:
        status, 0 for a clean decode, and the pixels, uint8 (height, width, 3) RGB, meaningful for status 0 only.
    """
    source = np.ascontiguousarray(np.frombuffer(jpeg, np.uint8))
    rgb = np.zeros((height, width, 3), np.uint8)
    if source.size == 0 or rgb.size == 0:
        return -1, rgb
    return int(decode_into(source.ctypes.data, source.size, height, width, rgb.ctypes.data)), rgb
