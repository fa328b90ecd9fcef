"""Finds, loads and checks the library compiled from the C files in this folder, without loading torch or NumPy."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from vitscale.ground.errors import MachineError

_VERSION = 8  # the C files' version: a checkout may be newer than the library compiled in it
_BUILD = "sudo apt-get install -y gcc libjpeg-dev && pip install --editable ."
_FOLDER = Path(__file__).parent


class Header(ctypes.Structure):
    """The C struct of this name."""

    _fields_ = [(name, ctypes.c_int32) for name in ("marker", "precision", "height", "width")] + [
        (name, ctypes.c_int32) for name in ("has_exif", "two_frames", "is_endless")
    ]


_ARRAY = c_void_p
# Arguments and result of each function, in C's order. Calls release the interpreter's lock while they run.
_FUNCTIONS = {
    "vitscale_libjpeg_turbo_version": ([], c_int),
    "vitscale_crc32c": ([_ARRAY, c_uint64], c_uint32),
    "vitscale_crc32c_by_tables": ([_ARRAY, c_uint64], c_uint32),
    "vitscale_header": ([_ARRAY, c_uint64, POINTER(Header)], c_int),
    "vitscale_decode": ([_ARRAY, c_uint64, c_int64, c_int64, c_int, _ARRAY], c_int),
    "vitscale_encode": ([_ARRAY, c_int64, c_int64, c_int, _ARRAY, POINTER(c_uint64)], c_int),
    "vitscale_decode_slice": ([_ARRAY, c_int64, c_int64, *[_ARRAY] * 9, c_int64, *[_ARRAY] * 4, c_int, _ARRAY], None),
    "vitscale_operate": ([_ARRAY, c_int64, c_int64, _ARRAY, c_int64, _ARRAY], c_int),
    "vitscale_inception_crop": ([c_int64, *[_ARRAY] * 3, *[c_double] * 4, _ARRAY], None),
    "vitscale_square_luma": ([_ARRAY, c_int64, _ARRAY, _ARRAY], c_int),
    "vitscale_without_borders": ([_ARRAY, c_int64, c_int64, _ARRAY], None),
    "vitscale_lowest_frequencies": ([_ARRAY, c_int64, _ARRAY, _ARRAY], None),
    "vitscale_near_pairs": ([*[_ARRAY, c_int64] * 2, *[c_int64] * 3, _ARRAY, c_int64, c_int], c_int64),
    "vitscale_aligned": ([_ARRAY] * 5, c_float),
}


@cache
def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises MachineError if it is not compiled, or from other C files."""
    # It uses nothing of Python, so what another version's compiled will do, too.
    compiled = [path for path in _FOLDER.glob("_images*.so") if path.is_file()]
    library = max(compiled, key=lambda path: path.stat().st_mtime, default=None)
    if library is None:
        raise MachineError(f"the part of vitscale that decodes images is not compiled. Build it with: {_BUILD}")
    try:
        loaded = ctypes.CDLL(str(library))
        version = loaded.vitscale_version()
        for name, (arguments, result) in _FUNCTIONS.items() if version == _VERSION else ():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise MachineError(
            f"{library} cannot be loaded ({error}). It needs the libjpeg-turbo that it was built with (Debian's "
            f"is libjpeg62-turbo, Ubuntu's libjpeg-turbo8), installed or beside that file. Else build it anew "
            f"with: {_BUILD}"
        ) from error
    if version != _VERSION:
        raise MachineError(f"{library} was compiled from another version of its C files. Build it anew with: {_BUILD}")
    return loaded


@cache
def libjpeg_turbo_version() -> str:
    """The version of libjpeg-turbo that decodes images, such as "2.1.5". Raises MachineError as `load` does.

    Decoded pixels are promised to be the same for the same version.
    """
    number = load().vitscale_libjpeg_turbo_version()
    return f"{number // 1_000_000}.{number // 1_000 % 1_000}.{number % 1_000}"
