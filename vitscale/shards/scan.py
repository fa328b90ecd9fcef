"""One pass over all bytes of a shard: its digests, and the checksum of every stored image."""

import hashlib
from dataclasses import dataclass
from io import FileIO

import numpy as np
import xxhash
from numba import njit

from vitscale.shards.beton import DEFAULT_PAGE_BYTES, ShardFile
from vitscale.shards.checksums import FileDigests, crc32c


@dataclass(frozen=True)
class Scan:
    """What a shard's bytes say.

    Attributes:
        digests: of the file.
        crc: uint32 (samples,), crc32c of the bytes that lie there.
        status: int32 (samples,), of decoding them, 0 for a clean one; None if that was not asked for.
    """

    digests: FileDigests
    crc: np.ndarray
    status: np.ndarray | None


def scan(shard: ShardFile, decode: bool = False) -> Scan:
    """Read a shard once, a page in memory at a time. Raises OSError, or RecipeError if FFCV is needed but not there."""
    crc = np.zeros(shard.samples, np.uint32)
    status = np.zeros(shard.samples, np.int32) if decode else None
    sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
    total = 0
    buffer = memoryview(bytearray(_page_bytes(shard)))
    with FileIO(shard.path) as file:
        while size := _fill(file, buffer):
            sha256.update(buffer[:size])
            xxh3.update(buffer[:size])
            page = np.frombuffer(buffer[:size], np.uint8)
            # Images ascend, and none crosses a page; one that the file no longer holds in full has no checksum.
            first, end = np.searchsorted(shard.offset, [total, total + size]).tolist()
            starts, sizes = shard.offset[first:end] - total, shard.size[first:end]
            whole = int(np.searchsorted(starts + sizes, size, side="right"))
            _checksums(page, starts[:whole], sizes[:whole], crc[first : first + whole])
            if status is not None:
                status[first:end] = -1
                for slot, start in zip(range(first, first + whole), starts.tolist(), strict=False):
                    status[slot] = _decode(shard, slot, page[start : start + int(shard.size[slot])])
            total += size
    return Scan(FileDigests(total, sha256.hexdigest(), xxh3.hexdigest()), crc, status)


def _page_bytes(shard: ShardFile) -> int:
    """Bytes such that no image crosses a multiple of them."""
    page = DEFAULT_PAGE_BYTES
    while np.any(shard.offset // page != (shard.offset + shard.size - 1) // page):
        page *= 2
    return page


def _fill(file: FileIO, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; returns the bytes read. Raises OSError."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done


@njit(nogil=True, cache=True)
def _checksums(data, starts, sizes, out):
    for i in range(len(out)):
        out[i] = crc32c(data, starts[i], sizes[i])


def _decode(shard: ShardFile, slot: int, image: np.ndarray) -> int:
    from vitscale.shards.jpeg import decode  # loads FFCV's library

    return decode(image, int(shard.height[slot]), int(shard.width[slot]))[0]
