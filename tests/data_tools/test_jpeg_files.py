import io

import numpy as np
import pytest
from pictures import encoded, make_picture
from PIL import Image

from data_tools.images import Reject, store_image
from data_tools.jpeg_files import Frame, decode_exactly, encode, read_frame

SOF0 = b"\xff\xc0\x00\x11"


@pytest.fixture(scope="module")
def photo() -> bytes:
    return encoded(make_picture(5, 37, 61), quality=90)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_frames_of_real_files_are_those_that_pillow_reads(data_root):
    for path in sorted((data_root / "oddities" / "files").glob("*.jpg")):
        data = path.read_bytes()
        frame = read_frame(data)
        if path.name == "monkey12.jpg":
            assert (frame.marker, frame.precision) == (0xC1, 12)
            continue
        with opened(data) as image:
            assert (frame.width, frame.height) == image.size, path.name
            assert (frame.marker == 0xC2) == ("progressive" in image.info), path.name
    assert read_frame((data_root / "oddities" / "files" / "testimgari.jpg").read_bytes()).marker == 0xC9


def test_what_lies_between_segments_is_skipped(photo):
    expected = Frame(0xC0, 8, 37, 61)
    assert read_frame(photo) == expected
    thumbnail = photo[:200]  # in a segment of its own: its start of frame is not the picture's
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    for junk in (b"junk", b"\xff\x00", b"\xff\xff\xff", b"\0\xff\x00\xff\xd0\xff\x01"):
        assert read_frame(photo[:2] + junk + photo[2:]) == expected
    assert read_frame(photo[:2] + segment + photo[2:]) == expected._replace(has_exif=True)
    for data in (photo[:2], b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 9, b"\xff\xd8\xff\xc0\0", b"\xff\xd8\xff\xda\0\2"):
        assert read_frame(data) is None


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (0xC3, "lossless JPEG"),
        *((marker, "hierarchical JPEG") for marker in (0xC5, 0xC6, 0xC7, 0xDE)),
        *((marker, f"arithmetic-coded JPEG (SOF{marker - 0xC0})") for marker in (0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)),
        (0xF7, "JPEG-LS"),
    ],
)
def test_other_kinds_of_jpeg_are_refused_by_name(photo, marker, reason):
    stored = store_image(photo.replace(SOF0, bytes([0xFF, marker]) + SOF0[2:]))
    assert isinstance(stored, Reject) and stored.reason.startswith(reason)


def test_other_bit_depths_are_refused_by_name(photo):
    stored = store_image(photo.replace(SOF0 + b"\x08", SOF0 + b"\x0c"))
    assert isinstance(stored, Reject) and stored.reason.startswith("12-bit JPEG")


def test_a_header_with_two_sizes_or_without_end_is_refused(photo):
    start = photo.index(SOF0)
    other = bytearray(photo[start : start + 19])
    other[5:9] = (74).to_bytes(2, "big") + (122).to_bytes(2, "big")  # the decoder would scale by 2 and report success
    assert "two frames" in store_image(photo[: start + 19] + bytes(other) + photo[start + 19 :]).reason
    endless = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000
    assert "10,000 segments" in store_image(endless).reason


@pytest.mark.parametrize("quality", [1, 75, 90, 95, 100])
def test_written_as_pillow_writes(quality):
    picture = make_picture(2, 45, 50)
    with (
        opened(encode(np.asarray(picture), quality)) as ours,
        opened(encoded(picture, quality=quality, subsampling="4:4:4")) as theirs,
    ):
        assert ours.quantization == theirs.quantization and ours.layer == theirs.layer
        assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs)).mean() < 0.1
        assert set(ours.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi"}


def test_decoded_as_pillow_decodes(photo):
    for data in (
        photo,
        encoded(make_picture(6, 20, 33).convert("L")),
        encoded(make_picture(7, 50, 9), progressive=True),
    ):
        with opened(data) as image:
            rgb = decode_exactly(data, image.height, image.width)
            assert np.abs(np.asarray(image.convert("RGB")).astype(int) - rgb).mean() < 0.1
    assert decode_exactly(photo[:-20], 37, 61) is None
    assert decode_exactly(encoded(make_picture(1, 8, 8).convert("CMYK")), 8, 8) is None


def test_extreme_sides():
    for shape in ((1, 65500, 3), (65500, 1, 3), (1, 1, 3)):
        with opened(encode(np.full(shape, 200, np.uint8), 95)) as image:
            assert image.size == (shape[1], shape[0]) and np.abs(np.asarray(image).astype(int) - 200).max() <= 1
    with pytest.raises(ValueError, match="65501"):
        encode(np.zeros((1, 65501, 3), np.uint8), 95)
