import google_crc32c
import numpy as np
import pytest

from vitscale.ground import native
from vitscale.ground.images import crc32c

SIZES = [*range(25), 1000, 65537]


def random_bytes(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_crc32c_equals_an_independent_implementation(size):
    data = random_bytes(size)
    for form in (data, bytearray(data), np.frombuffer(data, np.uint8)):
        assert crc32c(form) == google_crc32c.value(data)
    assert crc32c(memoryview(b"before" + data + b"after")[6 : 6 + size]) == google_crc32c.value(data)


@pytest.mark.parametrize("size", SIZES)
def test_processors_without_the_instruction_compute_the_same(size):
    data = random_bytes(size)
    assert native.load().vitscale_crc32c_by_tables(data, size) == google_crc32c.value(data)
