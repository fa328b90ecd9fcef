"""A shard that misstates a picture's size: the sample's checksum cannot see it."""

import struct

import pytest
from picture_shards import write_pictures
from pictures import encoded, make_picture
from views import kernel_views, whole_picture

from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder
from vitscale.data.settings import Reading
from vitscale.ground.errors import DataError
from vitscale.ground.images import OK, WRONG_SIZE

METADATA, ROW = 24 + 4 * 1041, 40  # bytes: header and four fields; one sample's record
WIDTH, HEIGHT = 1, 3  # where they stand in a record


def thumbnailed():
    """A JPEG whose EXIF block holds another, smaller JPEG."""
    exif = b"Exif\0\0" + encoded(make_picture(1, 16, 16))
    outer = encoded(make_picture(0, 48, 64))
    return outer[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + outer[2:]


PICTURES = {
    "baseline": lambda: encoded(make_picture(0, 48, 64)),
    "progressive": lambda: encoded(make_picture(0, 48, 64), progressive=True),
    "gray": lambda: encoded(make_picture(0, 48, 64).convert("L")),
    "thumbnail": thumbnailed,
}


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("stated", [(96, 64), (48, 128), (49, 64), (47, 64), (24, 32), (6, 8), (64, 48), (16, 16)])
def test_no_pixels_of_another_picture(kind, stated):
    height, width = stated
    status, seen = kernel_views(PICTURES[kind](), height, width, [(0, 0, height, width)], 8)
    assert status.tolist() == [WRONG_SIZE] and not seen.any()


@pytest.mark.parametrize("kind", PICTURES)
def test_the_right_size(kind):
    content = PICTURES[kind]()
    status, seen = kernel_views(content, 48, 64, [(8, 0, 8, 8)], 8)
    assert status.tolist() == [OK] and (seen[0] == whole_picture(content, 48, 64)[8:16, :8]).all()


@pytest.mark.parametrize("side", [WIDTH, HEIGHT])
@pytest.mark.parametrize("verify", [True, False])
def test_the_loader_says_which(tmp_path, side, verify):
    """The shard, where it is compared with its manifest; else the sample."""
    manifest = write_pictures(tmp_path / "data", [10, 10])
    path = manifest.shard_path(1)
    content = bytearray(path.read_bytes())
    content[METADATA + 5 * ROW + side] ^= 1  # one bit, in slot 5 of shard 1: uid 3 * 15
    path.write_bytes(content)
    named = r"shard-00001\.beton: " + ("" if verify else "slot 5, uid 45: ")
    reading = Reading(verify_shards=verify)
    loader = Loader(manifest, EvalOrder([10, 10], 4), image_size=8, transform=EvalTransform(), reading=reading)
    with loader, pytest.raises(DataError, match=named):
        list(loader)
