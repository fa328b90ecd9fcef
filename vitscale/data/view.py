"""`view.c` as functions for compiled kernels, without Python's part in between.

    c_view_jpeg(jpeg, jpeg_bytes, height, width, top, left, box_height, box_width, flip, may_scale, out, side) -> int32
    c_view_raw(pixels, pixel_bytes, height, width, top, left, box_height, box_width, flip, out, side) -> int32

Addresses are integers; `out` has room for side x side x 3 bytes. The caller vouches that the box lies in the picture.
"""

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import llvmlite.binding as llvm
from numba import types

from vitscale.errors import RecipeError

_VERSION = 2  # of view.c: a checkout may be newer than what was compiled in it
_BUILD = "sudo apt-get install -y gcc libjpeg-dev && pip install --editable ."


def _library() -> Path:
    folder = Path(__file__).parent
    found = [library for suffix in EXTENSION_SUFFIXES if (library := folder / f"_view{suffix}").is_file()]
    if not found:
        raise RecipeError(f"the part of vitscale that decodes images is not compiled. Build it with: {_BUILD}")
    return found[0]


def _register(library: Path) -> str:
    """Make the C functions known to LLVM, by address. Returns the version of libjpeg-turbo."""
    try:
        loaded = ctypes.CDLL(str(library))
        version, decoder = loaded.vitscale_view_version(), loaded.vitscale_libjpeg_turbo_version()
        for name in ("vitscale_view_jpeg", "vitscale_view_raw"):
            llvm.add_symbol(name, ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value)
    except (OSError, AttributeError) as error:
        raise RecipeError(f"{library} cannot be loaded ({error}). Build it anew with: {_BUILD}") from error
    if version != _VERSION:
        raise RecipeError(f"{library} was compiled from another version of view.c. Build it anew with: {_BUILD}")
    return f"{decoder // 1_000_000}.{decoder // 1_000 % 1_000}.{decoder % 1_000}"


LIBJPEG_TURBO_VERSION = _register(_library())
"""As "2.1.5". Pixels are promised to be the same for one version."""

c_view_jpeg = types.ExternalFunction(
    "vitscale_view_jpeg",
    types.int32(types.uintp, types.uint64, *([types.int64] * 8), types.uintp, types.int64),
)
c_view_raw = types.ExternalFunction(
    "vitscale_view_raw",
    types.int32(types.uintp, types.uint64, *([types.int64] * 7), types.uintp, types.int64),
)
