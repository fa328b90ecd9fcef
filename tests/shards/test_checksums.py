import google_crc32c
import numpy as np
import pytest

from vitscale.shards import checksums, crc32c, crc32c_of


@pytest.mark.parametrize("size", [*range(25), 1000, 65537])
def test_crc32c_equals_an_independent_implementation(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert crc32c_of(data) == google_crc32c.value(data)


def test_processors_without_the_instruction_compute_the_same():
    rng = np.random.default_rng(0)
    for word in rng.integers(0, 2**64, 20, np.uint64):
        crc = np.uint64(rng.integers(0, 2**32))
        eight = int(word).to_bytes(8, "little")
        expected = google_crc32c.extend(int(crc) ^ 0xFFFFFFFF, eight) ^ 0xFFFFFFFF
        assert checksums._by_tables(crc, word) == expected


def test_crc32c_of_a_range():
    data = np.arange(255, dtype=np.uint8)
    for start, size in ((0, 0), (0, 255), (3, 100), (254, 1)):
        assert crc32c(data, start, size) == google_crc32c.value(data[start : start + size].tobytes())
