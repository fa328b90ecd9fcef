"""A tar of images, read by offset from any process. A compressed one is unpacked to a plain one first."""

import bz2
import errno
import gzip
import lzma
import posixpath
import shutil
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.sources.listing import NO_FILE
from vitscale.errors import DataError

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


def open_tar(path: Path, work: Path) -> "TarSource":
    """The tar at `path`; unpacked into `work` if it is compressed. Raises DataError for a damaged one."""
    suffix = max((suffix for suffix in TAR_SUFFIXES if path.name.lower().endswith(suffix)), key=len)
    opener = TAR_SUFFIXES[suffix]
    if opener is None:
        return TarSource(path, str(path))
    plain = work / "source.tar"
    try:
        with opener(path, "rb") as packed, plain.open("wb") as out:
            shutil.copyfileobj(packed, out, _COPY_BYTES)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged archive ({error})") from error
    except OSError as error:
        # bz2 reports damage as an OSError without number.
        what = f"cannot be unpacked into {work} ({error.strerror})" if error.errno else f"damaged archive ({error})"
        raise DataError(f"{path}: {what}") from error
    return TarSource(plain, str(path))


@dataclass(frozen=True)
class TarSource:
    """Images in a plain tar. A location is (position, size) in bytes; `name` is what people call the archive."""

    path: Path
    name: str

    def files(self, ignored: Counter[str]) -> Iterator[tuple[bytes, tuple[int, int]]]:
        """Every file of the archive, links resolved to what they point at. Raises DataError for a damaged archive."""
        places: dict[str, tuple[int, int]] = {}
        try:
            # Names are only ever keys: nothing is extracted, so a path cannot lead anywhere.
            with tarfile.open(self.path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
                for member in archive:
                    place = _place(member, places)
                    if place is not None:
                        places[posixpath.normpath(member.name)] = place
                        yield member.name.encode("utf-8", "surrogateescape"), place
                    elif not member.isdir():
                        ignored[NO_FILE] += 1
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header in memory
                end = archive.offset
            self._check_end(end)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise DataError(f"{self.name}: truncated or damaged archive ({error})") from error
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read ({error.strerror or error})") from error

    def read(self, location: tuple[int, int]) -> bytes:
        """The bytes of a file. Raises OSError."""
        position, size = location
        with self.path.open("rb") as file:
            file.seek(position)
            data = file.read(size)
        if len(data) != size:
            raise OSError(errno.EIO, "the archive has become shorter")
        return data

    def _check_end(self, end: int) -> None:
        """Python's tarfile takes a damaged header, or a cut between two files, for the end: tell them apart."""
        with self.path.open("rb") as file:
            file.seek(end)
            mark = file.read(tarfile.BLOCKSIZE)
            if len(mark) < tarfile.BLOCKSIZE or any(mark):
                short = len(mark) < tarfile.BLOCKSIZE
                what = "truncated: no end-of-archive mark" if short else "a damaged header"
                raise DataError(f"{self.name}: {what} at byte {end:,}; what follows would be lost")
            while block := file.read(_COPY_BYTES):
                if block.count(0) != len(block):
                    raise DataError(
                        f"{self.name}: data after the end of the archive at byte {end:,}. "
                        "Are these several archives in one file? Then convert them one by one or repack them"
                    )


def _place(member: tarfile.TarInfo, places: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Where the bytes of a member are; None if it has none here (folders, devices, links to elsewhere)."""
    if member.isreg() and not member.issparse():
        return member.offset_data, member.size
    if member.islnk():
        return places.get(posixpath.normpath(member.linkname))
    if member.issym():
        return places.get(posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname)))
    return None
