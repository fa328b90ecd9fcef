"""The size that a JPEG states, found without a decoder, and without reading anything beyond it."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encoded, make_picture
from PIL import Image

from vitscale.shards import jpeg
from vitscale.shards.jpeg_header import has_size


def as_array(content):
    return np.frombuffer(content, np.uint8)


def thumbnailed():
    """A JPEG whose EXIF block holds another, smaller JPEG."""
    inner = encoded(make_picture(1, 16, 16))
    exif = b"Exif\0\0" + inner
    outer = encoded(make_picture(0, 48, 64))
    return outer[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + outer[2:]


def filled():
    """Any marker may be preceded by further 0xFF."""
    content = encoded(make_picture(0, 48, 64))
    return content[:2] + b"\xff\xff\xff" + content[2:]


def parameterless(marker):
    """Markers without a length are legal anywhere, and the decoder takes them without a warning."""
    content = encoded(make_picture(0, 48, 64))
    content = content[:2] + marker + content[2:]
    assert jpeg.decode(content, 48, 64)[0] == 0
    return content


PICTURES = {
    "baseline": lambda: encoded(make_picture(0, 48, 64)),
    "progressive": lambda: encoded(make_picture(0, 48, 64), progressive=True),
    "gray": lambda: encoded(make_picture(0, 48, 64).convert("L")),
    "thumbnail": thumbnailed,
    "fill bytes": filled,
    "RST": lambda: parameterless(b"\xff\xd0\xff\xd7"),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_the_size_is_found(kind):
    content = PICTURES[kind]()
    assert Image.open(io.BytesIO(content)).size == (64, 48)
    buffer = as_array(b"before" + content + b"after")
    assert has_size(buffer, 6, len(content), 48, 64)
    for height, width in ((47, 64), (48, 65), (64, 48), (16, 16), (48 + 256, 64), (0, 0)):
        assert not has_size(buffer, 6, len(content), height, width)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0xFF, 0xC0, 0xC4, 0xD8, 0x00, 0x02, 0x09]), max_size=40), st.integers(0, 5))
def test_nothing_beyond_the_sample_is_read(tail, start):
    """In Python, where an index beyond the array is an error."""
    content = as_array(bytes(start) + b"\xff\xd8" + bytes(tail))
    assert has_size.py_func(content, start, len(content) - start, 2, 2) in (False, True)
    for size in range(3):
        assert not has_size.py_func(content[: start + size], start, size, 2, 2)
