"""FFCV's own decoder, which knows nothing of ours: the C function of its extension, without its package."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np


@cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("ffcv")  # locates the package, does not run it
    assert spec is not None and spec.submodule_search_locations
    (library,) = Path(spec.submodule_search_locations[0]).glob("_libffcv*.so")
    loaded = ctypes.CDLL(str(library))
    sizes = [ctypes.c_uint32] * 2
    loaded.imdecode.argtypes = [
        *(ctypes.c_char_p, ctypes.c_uint64, *sizes, ctypes.c_void_p),  # file, its size, height, width, pixels
        *(*sizes, *sizes, *sizes, ctypes.c_bool, ctypes.c_bool),  # crop: size, place; scale; whether to crop, flip
    ]
    return loaded


def ffcv_decode(jpeg: bytes, height: int, width: int) -> np.ndarray | None:
    """A JPEG as FFCV decodes it, uint8 (height, width, 3); None if it complains."""
    rgb = np.zeros((height, width, 3), np.uint8)
    size = (height, width)
    status = _library().imdecode(jpeg, len(jpeg), *size, rgb.ctypes.data, *size, 0, 0, 1, 1, False, False)
    return rgb if status == 0 else None
