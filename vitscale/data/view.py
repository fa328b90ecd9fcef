"""`view.c` as functions for compiled kernels, without Python's part in between.

    c_view_jpeg(jpeg, jpeg_bytes, height, width, top, left, box_height, box_width, flip, may_scale, out, side) -> int32
    c_view_raw(pixels, pixel_bytes, height, width, top, left, box_height, box_width, flip, out, side) -> int32

Addresses are integers; `out` has room for side x side x 3 bytes. The caller vouches that the box lies in the picture.
"""

import ctypes

import llvmlite.binding as llvm
from numba import types

from vitscale import native

_library = native.load()
for _name in ("vitscale_view_jpeg", "vitscale_view_raw"):
    llvm.add_symbol(_name, ctypes.cast(getattr(_library, _name), ctypes.c_void_p).value)

LIBJPEG_TURBO_VERSION = native.libjpeg_turbo_version()
"""As "2.1.5". Pixels are promised to be the same for one version."""

c_view_jpeg = types.ExternalFunction(
    "vitscale_view_jpeg",
    types.int32(types.uintp, types.uint64, *([types.int64] * 8), types.uintp, types.int64),
)
c_view_raw = types.ExternalFunction(
    "vitscale_view_raw",
    types.int32(types.uintp, types.uint64, *([types.int64] * 7), types.uintp, types.int64),
)
