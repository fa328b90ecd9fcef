"""Reads the members of a tar from first to last, and reports every kind of damage.

A plain tar on this machine is read by offsets; a compressed or remote one as a stream, once. Names are only ever keys:
nothing is extracted, so a path cannot lead anywhere.
"""

import bz2
import gzip
import lzma
import os
import posixpath
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NamedTuple

from data_tools.sources.parts import open_part, unpacked
from data_tools.sources.source import NO_FILE, RANGE, read_range
from vitscale.data.shards.images import IMAGE_SUFFIXES, MAX_IMAGE_BYTES
from vitscale.ground import storage
from vitscale.ground.errors import DataError

# Suffix -> what opens the compressed stream; None for a plain tar.
TAR_SUFFIXES: dict[str, Callable[..., Any] | None] = {
    ".tar": None,
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".txz": lzma.open,
    ".tar.bz2": bz2.open,
}

_COPY_BYTES = 4 << 20
_MAX_HEADER_BYTES = 16 << 20  # names and attributes of one member, in extended headers
_MAX_DIGITS = 100  # in a row there: tarfile takes n² steps for n of them (CVE-2024-6232)
_MAX_GLOBAL_RECORDS = 1000  # tarfile applies each of them to each member
# tarfile itself fails on maliciously odd headers, hence the last line.
_DAMAGE = (
    *(tarfile.TarError, EOFError, lzma.LZMAError, zlib.error),
    *(ValueError, LookupError, ArithmeticError, MemoryError, RecursionError),
)


def is_tar(name: str) -> bool:
    """Whether a file is a tar, by its name."""
    return name.lower().endswith(tuple(TAR_SUFFIXES))


def suffix_of(name: str) -> str:
    """The longest of TAR_SUFFIXES that a name ends in; empty for none."""
    return max((suffix for suffix in TAR_SUFFIXES if name.lower().endswith(suffix)), key=len, default="")


def stem_of(where: str) -> str:
    """The last part of a tar's path or URL, without its suffix."""
    name = storage.base_name(where)
    return name[: len(name) - len(suffix_of(name))]


def must_stream(where: str) -> bool:
    """Whether a tar can only be read from start to end."""
    return storage.is_url(where) or TAR_SUFFIXES[suffix_of(where)] is not None


ByteRange = tuple[int, int]  # offset from the start of the outermost archive, and size


class Member(NamedTuple):
    """A file of an archive. `path` is its path in the archive, in whatever encoding."""

    path: bytes
    place: ByteRange


@dataclass
class _Stream:
    """Moves only forwards, except for one byte back: tarfile checks that the last byte before a header is there."""

    file: BinaryIO
    position: int = 0
    last: bytes = b""
    repeats: bool = False

    def seek(self, position: int) -> None:
        self.repeats = position == self.position - 1
        assert self.repeats or position >= self.position, "a stream goes forwards only"
        while self.position < position and self.read(min(_COPY_BYTES, position - self.position)):
            pass

    def read(self, size: int) -> bytes:
        if self.repeats and size > 0:
            self.repeats = False
            return self.last + self.read(size - 1)
        data = self.file.read(size)
        self.position += len(data)
        self.last = data[-1:] or self.last
        return data


class _Reader:
    """A range of bytes as the file object that tarfile wants. It moves only forwards and never beyond its end, so no
    header can make tarfile loop. `last` holds the bytes read last: after the last member, the end mark."""

    def __init__(self, raw: BinaryIO | _Stream, start: int, size: int | None):
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
        if max(map(len, re.findall(rb"\d+", self.last)), default=0) > _MAX_DIGITS:
            raise tarfile.ReadError("a header with a number of too many digits")
        return self.last


class Archive:
    """A tar, or one inside another tar. `name` is what messages call it."""

    def __init__(self, name: str, raw: BinaryIO | _Stream, start: int = 0, size: int | None = None):
        self.name = name
        self._raw, self._start, self._size = raw, start, size

    def headers(self) -> Iterator[tarfile.TarInfo]:
        """Every member. Raises DataError for an archive that is damaged, or that has data after its end."""
        with _damage_told(self.name):
            reader = _Reader(self._raw, self._start, self._size)
            with tarfile.TarFile(fileobj=reader, encoding="utf-8", errors="surrogateescape") as archive:  # type: ignore[arg-type]
                for header in archive:
                    if not 0 <= header.size < 1 << 63:
                        raise tarfile.ReadError(f"a file of {header.size:,} bytes")
                    if len(archive.pax_headers) > _MAX_GLOBAL_RECORDS:
                        raise tarfile.ReadError(f"{len(archive.pax_headers):,} global records")
                    yield header
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header in memory
                self._check_end(reader, archive.offset)

    def files(self, ignored: Counter[str]) -> Iterator[Member]:
        """Every file; a link becomes the earlier file that it points at. Raises as `headers`.

        A link to an image in a stream is a DataError: a stream cannot go back to it.
        """
        links: dict[int, ByteRange] | None = None
        for header in self.headers():
            place = self._place(header)
            if place is None and (header.islnk() or header.issym()):
                if isinstance(self._raw, _Stream):
                    self._refuse_image(header)
                else:
                    links = self._links() if links is None else links
                    place = links.get(header.offset)
            if place is not None:
                yield Member(header.name.encode("utf-8", "surrogateescape"), place)
            elif not header.isdir():
                ignored[NO_FILE] += 1

    def content(self, member: Member, streams: bool) -> bytes:
        """An Item's `content`: the bytes if the source streams, else their place, packed."""
        return self.read(member, MAX_IMAGE_BYTES) if streams else RANGE.pack(*member.place)

    def read(self, member: Member, limit: int) -> bytes:
        """The bytes of the file that `files` yielded last. Raises DataError if there are more than `limit`."""
        offset, size = member.place
        if size > limit:
            raise DataError(f"{self.name}: {os.fsdecode(member.path)!r} has {size:,} bytes; expected at most {limit:,}")
        with _damage_told(self.name):
            self._raw.seek(offset)
            data = self._raw.read(size)
            if len(data) < size:
                raise EOFError("unexpected end of data")
            return data

    def inside(self, member: Member) -> "Archive":
        """A member that is itself a tar; to be read before the next member."""
        return Archive(f"{self.name}: {os.fsdecode(member.path)}", self._raw, *member.place)

    def _place(self, header: tarfile.TarInfo) -> ByteRange | None:
        if header.isreg() and not header.issparse():
            return self._start + header.offset_data, header.size
        return None

    def _links(self) -> dict[int, ByteRange]:
        """Offset of a link's header -> place of its target. Takes extra passes over the tar, to save memory."""
        targets = {_target(header) for header in self.headers() if header.islnk() or header.issym()}
        places: dict[str, ByteRange] = {}
        links: dict[int, ByteRange] = {}
        for header in self.headers():
            place = self._place(header)
            if header.islnk() or header.issym():
                place = places.get(_target(header))
                if place is not None:
                    links[header.offset] = place
            name = posixpath.normpath(header.name)
            if place is not None and name in targets:
                places[name] = place
        return links

    def _refuse_image(self, header: tarfile.TarInfo) -> None:
        if header.name.lower().endswith((*IMAGE_SUFFIXES, *TAR_SUFFIXES)):
            raise DataError(
                f"{self.name}: {header.name!r} is a link to {header.linkname!r}, and in an archive that is compressed "
                "or remote an earlier file cannot be read again. Unpack it to a plain .tar on this machine; or pack "
                "it anew with copies in place of links (tar --dereference --hard-dereference)"
            )

    def _check_end(self, reader: _Reader, end: int) -> None:
        """Check the end mark: Python's tarfile takes a damaged header, or a cut between two files, for the end."""
        mark = reader.last
        if len(mark) < tarfile.BLOCKSIZE or any(mark):
            short = len(mark) < tarfile.BLOCKSIZE
            what = "truncated: no end-of-archive mark" if short else "a damaged header"
            raise DataError(f"{self.name}: {what} at byte {end:,}; what follows would be lost")
        while block := reader.read(_COPY_BYTES):
            if block.count(0) != len(block):
                raise DataError(
                    f"{self.name}: data after the end of the archive at byte {end:,}. "
                    "Are these several archives in one file? Then convert them one by one or repack them"
                )


@contextmanager
def open_archive(where: str) -> Iterator[Archive]:
    """The tar at a path or URL. Raises DataError or StorageError."""
    streams = must_stream(where)
    with _damage_told(where):
        opened = open_part(where) if streams else storage.open_stream(where)
    with opened as file:
        unpack = TAR_SUFFIXES[suffix_of(where)]
        raw: BinaryIO = unpacked(where, file, unpack) if unpack else file
        yield Archive(where, _Stream(raw) if streams else raw)


@dataclass(frozen=True)
class ArchiveSource:
    """What sources of tars share. An item's content is `Archive.content`."""

    parts: tuple[str, ...]
    streams: bool
    class_names: ClassVar[tuple[str, ...] | None] = None

    def read(self, part: int, content: bytes) -> bytes:
        """The bytes of one image file. Raises OSError."""
        return read_range(self.parts[part], content, "archive")


def _target(header: tarfile.TarInfo) -> str:
    """The target of a link, as a path from the archive's root."""
    folder = posixpath.dirname(header.name) if header.issym() else ""
    return posixpath.normpath(posixpath.join(folder, header.linkname))


@contextmanager
def _damage_told(name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DataError(f"{name}: truncated or damaged archive ({error})") from error
    except OSError as error:
        # gzip and bz2 report damage as an OSError without errno; some remote file systems report missing objects so.
        if error.errno is None and not isinstance(error, FileNotFoundError | PermissionError):
            raise DataError(f"{name}: truncated or damaged archive ({error})") from error
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
