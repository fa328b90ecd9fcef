"""One pass over all bytes of a shard: its digests, and the checksum and the stated size of every stored image."""

import hashlib
import os
from collections.abc import Callable
from io import FileIO
from typing import NamedTuple

import numpy as np
import xxhash

from vitscale.data.shards.beton import ShardFile
from vitscale.ground.files.digests import FileDigests
from vitscale.ground.images import OK, check, crc32c, states_size

_BLOCK_BYTES = 8 << 20


class Scan(NamedTuple):
    """What a shard's bytes actually are, to be compared with what is stated about them."""

    digests: FileDigests
    crc: np.ndarray  # crc32c of the bytes found for each image, uint32 (samples,)
    # Whether an image is raw pixels, or a JPEG whose own header has the height and width that the shard states; bool.
    is_sized: np.ndarray
    status: np.ndarray | None  # the decoder's status for each image, 0 for a clean one, int32; None if not decoded


def scan(shard: ShardFile, decode: bool = False, progress: Callable[[int], None] | None = None) -> Scan:
    """Read a shard once, with 8 MiB in memory at a time, or its largest image if that is larger.

    An image that the file no longer holds in full gets a checksum of 0, `is_sized` False and a status that is not 0.

    `progress` is called now and then with the number of bytes read. Raises OSError, and RecipeError as
    `vitscale.ground.images` does.
    """
    order = np.argsort(shard.offset, kind="stable")
    ends = (shard.offset + shard.size)[order]
    crc, is_sized = np.zeros(shard.samples, np.uint32), np.zeros(shard.samples, bool)
    status = np.full(shard.samples, -1, np.int32) if decode else None
    sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    start = held = done = total = 0  # the buffer holds `held` bytes from position `start` on
    with FileIO(shard.fd, closefd=False) as file:
        file.seek(0)
        end = os.fstat(shard.fd).st_size  # a file that is being written may never end
        while size := file.readinto(buffer[held : held + end - total]):
            sha256.update(buffer[held : held + size])
            xxh3.update(buffer[held : held + size])
            held, total = held + size, total + size
            whole = int(np.searchsorted(ends, total, side="right"))
            slots = order[done:whole]
            for slot, at in zip(slots.tolist(), (shard.offset[slots] - start).tolist(), strict=True):
                image = buffer[at : at + int(shard.size[slot])]
                height, width = int(shard.height[slot]), int(shard.width[slot])
                crc[slot] = crc32c(image)
                is_sized[slot] = shard.raw[slot] or states_size(image, height, width)
                if status is not None:
                    status[slot] = OK if shard.raw[slot] else check(image, height, width)
            done = whole
            # The beginning of an incomplete image moves to the front of the buffer; the rest of it is read behind.
            kept, needed = total, 0
            if done < shard.samples:
                kept, needed = min(total, int(shard.offset[order[done]])), int(shard.size[order[done]])
            begun = buffer[kept - start : held]
            if kept < total and needed > len(buffer):
                buffer = memoryview(bytearray(needed))
            buffer[: len(begun)] = begun
            start, held = kept, len(begun)
            if progress is not None:
                progress(total)
    return Scan(FileDigests(total, sha256.hexdigest(), xxh3.hexdigest()), crc, is_sized, status)
