"""Reads numpy's arrays from files that nobody vouches for: no number in a header is believed before the file's size."""

import io
import math
from pathlib import Path
from typing import IO

import numpy as np

_KINDS = "biufcV"  # V: bf16, which is void to numpy
_MOST_EMPTY = 1 << 20  # rows of no bytes
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

Header = tuple[tuple[int, ...], bool, np.dtype]  # an array's shape, whether it is in column-major order, and its type


def read_header(file: IO[bytes], size: int) -> Header:
    """The header of the `.npy` at the beginning of a file of `size` bytes, all of which it has to describe.

    Raises ValueError for everything else, and for other types than plain numbers; and OSError.
    """
    try:
        shape, column_major, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        is_plain = dtype.kind in _KINDS and dtype.names is None and dtype.subdtype is None
        stated = math.prod(shape) * dtype.itemsize
    except OSError:
        raise
    except Exception as error:  # the header is a Python literal, which numpy reads in three ways
        raise ValueError(f"not a .npy file, or its header is damaged ({type(error).__name__})") from error
    if not is_plain:
        raise ValueError("it holds other objects than plain numbers, which are not read")
    there = size - file.tell()
    if stated != there or min(shape, default=0) < 0 or (not stated and max(shape, default=0) > _MOST_EMPTY):
        raise ValueError(f"{there:,} bytes of numbers, and its header says another number")
    return shape, column_major, dtype


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """The array in a file of `size` bytes; read-only. Raises as `read_header`."""
    shape, column_major, dtype = read_header(file, size)
    content = file.read()
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError("truncated")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if column_major else "C")


def parse_array(content: bytes) -> np.ndarray:
    """The array in the content of a `.npy`; read-only. Raises ValueError."""
    return read_array(io.BytesIO(content), len(content))


def map_array(path: Path) -> np.ndarray:
    """The array in a `.npy`, mapped into memory, read-only. Raises as `read_header`."""
    with path.open("rb") as file:
        shape, column_major, dtype = read_header(file, path.stat().st_size)
        if 0 in shape:  # nothing to map
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if column_major else "C")
