"""Digests of whole files. SHA-256 proves; XXH3-128 is fast enough to verify a shard each time it arrives in a cache."""

import hashlib
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import xxhash

from vitscale.ground.storage import regular

_BLOCK_BYTES = 4 << 20


class FileDigests(NamedTuple):
    """Size in bytes and lower-case hexadecimal digests of one file."""

    bytes: int
    sha256: str
    xxh3_128: str


def file_digests(path: str | Path) -> FileDigests:
    """Size, SHA-256 and XXH3-128, in one pass and bounded memory. Raises OSError, also if it is no regular file."""
    sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
    size = 0
    with FileIO(path, opener=regular) as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            xxh3.update(block)
            size += len(block)
    return FileDigests(size, sha256.hexdigest(), xxh3.hexdigest())
