"""Opens the parts of a source, local or remote, and gives them the names that begin their images' keys."""

import gzip
import io
import os
import posixpath
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from vitscale.ground.errors import DataError, RecipeError, StorageError
from vitscale.ground.files.unpacked import refuse_growth
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import base_name, is_url, open_stream, patiently

_BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b\x08"


class _PatientFile(io.RawIOBase):
    """A remote file whose reads are all retried as `storage.patiently` does."""

    def __init__(self, where: str, file: BinaryIO) -> None:
        self._where, self._file = where, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = patiently(self._where, lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _Unpacked(io.RawIOBase):
    """A decompressed stream that may not grow too far."""

    def __init__(self, where: str, file: BinaryIO, content: Any) -> None:
        self._where, self._file, self._content, self._read = where, file, content, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data: bytes = self._content.read(len(buffer))
        buffer[: len(data)] = data
        self._read += len(data)
        refuse_growth(self._where, self._file.tell(), self._read)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_part(where: str) -> io.BufferedReader:
    """A part's bytes as stored. Raises OSError or StorageError."""
    file = open_stream(where)
    raw: Any = _PatientFile(where, file) if is_url(where) else file
    return io.BufferedReader(raw, _BLOCK_BYTES)


def open_unzipped(where: str) -> io.BufferedReader:
    """A part's bytes, decompressed if it is a gzip file. Raises as `open_part`, and as `gzip` if that is damaged."""
    file = open_part(where)
    return unpacked(where, file) if is_gzip(file) else file


def is_gzip(file: io.BufferedReader) -> bool:
    """Whether a file begins like gzip; does not move its position."""
    return file.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC


def unpacked(where: str, file: BinaryIO, unpack: Callable[..., Any] = gzip.open) -> io.BufferedReader:
    """The content of a compressed file; closing it closes the file. Reading raises DataError if it grows too far."""
    return io.BufferedReader(_Unpacked(where, file, unpack(file)), _BLOCK_BYTES)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turns the errors of reading a part into errors for people.

    Raises:
        DataError: the part is damaged, missing or forbidden.
        StorageError: remote storage does not answer.
    """
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{where}: truncated or damaged gzip data ({error})") from error
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{where}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise DataError(f"{where}: damaged: it claims more bytes than memory can hold") from error
    except OSError as error:
        what = f"{where}: cannot be read ({error.strerror or error})"
        if is_url(where):
            raise StorageError(f"{what}. Repeat the command to continue") from error
        raise DataError(what) from error


def clean_path(path: str) -> str:
    """A path or URL as the key of an image: without scheme, secrets, leading / or upward steps."""
    inside = without_secrets(path).partition("://")[2] if is_url(path) else path
    return posixpath.normpath(f"/{inside}").lstrip("/")


def part_names(files: Sequence[str], stem: bool = False) -> tuple[str, ...]:
    """The beginning of each part's keys: its file name (without suffix if `stem`), or a longer path if names repeat.

    Raises RecipeError for a file given twice.
    """
    paths = [clean_path(file) for file in files]
    if stem:
        paths = [posixpath.splitext(path)[0] for path in paths]
    names = [base_name(path) for path in paths]
    if len(set(names)) == len(names):
        return tuple(names)
    if repeated := sorted(path for path, times in Counter(paths).items() if times > 1):
        raise RecipeError(f"{', '.join(repeated[:5])}: given twice")
    common = len(posixpath.commonpath([posixpath.dirname(f"/{path}") for path in paths]))
    return tuple(path[common:].lstrip("/") for path in paths)
