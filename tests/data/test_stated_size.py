"""A shard that misstates a picture's size: the checksum cannot see it, and the decoder does not mind."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_shards import write_pictures
from pictures import encoded, make_picture
from PIL import Image

from vitscale.data import EvalOrder, EvalTransform, Loader
from vitscale.data.kernel import SIZE_MISMATCH, decode_slice, has_size
from vitscale.errors import DataError
from vitscale.shards import crc32c_of, jpeg

METADATA, ROW = 24 + 4 * 1041, 40  # bytes: header and four fields; one sample's record
WIDTH, HEIGHT = 1, 3  # where they stand in a record


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


@pytest.mark.parametrize("stated", [(96, 64), (48, 128), (49, 64), (47, 64), (24, 32), (6, 8), (64, 48)])
def test_no_pixels_of_another_sample(stated):
    """The decoder alone would leave a part of the scratch memory as it was, and report success."""
    height, width = stated
    content = as_array(encoded(make_picture(0, 48, 64)))
    out = np.full((1, 8, 8, 3), 99, np.uint8)
    status = np.zeros(1, np.int32)
    decode_slice(
        content,
        np.zeros(1, np.int64),
        np.array([len(content)]),
        np.array([crc32c_of(content)], np.uint32),
        np.array([height]),
        np.array([width]),
        np.array([[0, 0, height, width]], np.int32),
        np.zeros(1, bool),
        np.full(height * width * 3, 123, np.uint8),
        out,
        status,
    )
    assert status.tolist() == [SIZE_MISMATCH] and not out.any()


@pytest.mark.parametrize("side", [WIDTH, HEIGHT])
def test_the_loader_names_the_sample(tmp_path, side):
    manifest = write_pictures(tmp_path / "data", [10, 10])
    path = manifest.shard_path(1)
    content = bytearray(path.read_bytes())
    content[METADATA + 5 * ROW + side] ^= 1  # one bit, in slot 5 of shard 1: uid 3 * 15
    path.write_bytes(content)
    named = r"shard-00001\.beton: slot 5, uid 45: .*height and width"
    loader = Loader(manifest, EvalOrder([10, 10], 4), image_size=8, transform=EvalTransform())
    with loader, pytest.raises(DataError, match=named):
        list(loader)
