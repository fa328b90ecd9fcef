"""Bytes of a tar, from a plain file by offset or from a stream, as the file object that tarfile wants."""

import tarfile
from dataclasses import dataclass
from typing import BinaryIO, Protocol

_SKIP_BYTES = 4 << 20
_MAX_HEADER_BYTES = 64 << 20  # names and attributes of one member, in extended headers


class Raw(Protocol):
    """Bytes at a position. A stream can only move forwards."""

    streams: bool

    def seek(self, position: int) -> None: ...

    def read(self, size: int) -> bytes: ...


@dataclass
class Plain:
    """A plain file on this machine."""

    file: BinaryIO
    streams: bool = False

    def seek(self, position: int) -> None:
        self.file.seek(position)

    def read(self, size: int) -> bytes:
        return self.file.read(size)


@dataclass
class Stream:
    """Moves only forwards, except for one byte back: tarfile checks that the last byte before a header is there."""

    file: BinaryIO
    streams: bool = True
    position: int = 0
    last: bytes = b""
    repeats: bool = False

    def seek(self, position: int) -> None:
        self.repeats = position == self.position - 1
        assert self.repeats or position >= self.position, "a stream goes forwards only"
        while self.position < position and self.read(min(_SKIP_BYTES, position - self.position)):
            pass

    def read(self, size: int) -> bytes:
        if self.repeats and size > 0:
            self.repeats = False
            return self.last + self.read(size - 1)
        data = self.file.read(size)
        self.position += len(data)
        self.last = data[-1:] or self.last
        return data


class Reader:
    """A range of bytes as the file object that tarfile wants. It moves only forwards and never beyond its end, so no
    header can make tarfile loop. `last` holds the bytes read last: after the last member, the end mark."""

    def __init__(self, raw: Raw, start: int, size: int | None):
        self.last = b""
        self._raw, self._start, self._size = raw, start, size
        self._position = self._empty_reads = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("a header that points backwards")
        self._position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES or self._empty_reads > 1:
            raise tarfile.ReadError("unexpected end of data" if self._empty_reads else f"a header of {size:,} bytes")
        if self._size is not None:
            size = max(0, min(size, self._size - self._position))
        self._raw.seek(self._start + self._position)
        self.last = self._raw.read(size)
        self._position += len(self.last)
        self._empty_reads += not self.last
        return self.last
