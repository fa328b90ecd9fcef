"""Loads pickles of plain values and numeric numpy arrays only; nothing that a pickle names is run.

A pickle may call whatever it can import. Here it imports nothing: the few names that numpy's arrays need are mapped to
objects of this file, which take a shape, a type and bytes.
"""

import io
import pickle
from typing import Any

import numpy as np

from vitscale.errors import DataError
from vitscale.files.pickles import check_pickle
from vitscale.wording import shortened

_NUMERIC = frozenset(f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)) - {"f1"}


def load_pickle(data: bytes, where: str) -> Any:
    """The value in a pickle written by Python 2 or 3; a `str` of Python 2 becomes bytes.

    Allowed are dicts, lists, tuples, numbers, texts, and arrays at the top or directly in a dict. Raises DataError for
    everything else, without having run any of it, and for damage.
    """
    try:
        check_pickle(data)
        value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        if isinstance(value, dict):
            value = {key: _unwrapped(item) for key, item in value.items()}
        return _unwrapped(value)
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(f"{where}: not a pickle of plain values and arrays: {shortened(str(error))}") from error


class _DType:
    """Replaces `numpy.dtype` in a pickle."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self._code = _text(code)
        self._order = "="
        if self._code not in _NUMERIC:
            raise pickle.UnpicklingError(f"an array of type {self._code[:20]!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = _text(state[1])

    def resolve(self) -> np.dtype:
        return np.dtype(f"{self._order}{self._code}")


class _Array:
    """Replaces numpy's array constructors in a pickle."""

    value: np.ndarray

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, is_fortran, data = state
        self.value = np.frombuffer(data, dtype.resolve()).reshape(shape, order="F" if is_fortran else "C")


def _from_buffer(data: bytes, dtype: _DType, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Replaces `_codecs.encode`, by which Python 3 writes bytes in the old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes as {encoding!r}")
    return text.encode("latin1")


# numpy.core became numpy._core with numpy 2.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _DType,
    ("numpy", "ndarray"): None,  # only an argument, which _Array ignores
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused") from None


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value
