"""Digests and checksums against independent implementations."""

import hashlib

import google_crc32c
import numpy as np
import xxhash

from vitscale.ground import native
from vitscale.ground.files.digests import file_digests
from vitscale.ground.images import crc32c


def test_file_digests(tmp_path):
    data = np.random.default_rng(0).bytes((4 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert file_digests(tmp_path / "file") == (
        len(data),
        hashlib.sha256(data).hexdigest(),
        xxhash.xxh3_128_hexdigest(data),
    )


def test_crc32c_equals_an_independent_implementation():
    """By the processor's instruction and by tables, for every length within three words, and long ones."""
    for size in (*range(25), 1000, 65537):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        expected = google_crc32c.value(data)
        for form in (data, bytearray(data), np.frombuffer(data, np.uint8)):
            assert crc32c(form) == expected, size
        assert crc32c(memoryview(b"before" + data + b"after")[6 : 6 + size]) == expected, size
        assert native.load().vitscale_crc32c_by_tables(data, size) == expected, size
