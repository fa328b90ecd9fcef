"""What a JPEG says of itself, read as its decoder reads it, and nothing beyond its bytes."""

import io

import pytest
from damaged_jpegs import HEIGHT, WIDTH, small_jpegs
from messages import refusal
from pictures import encoded, make_picture
from PIL import Image

from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.images import OK, Header, check, read_header, states_size

SOF0 = b"\xff\xc0\x00\x11"


@pytest.fixture(scope="module")
def photo() -> bytes:
    return encoded(make_picture(5, 37, 61), quality=90)


def filled():
    """Any marker may be preceded by further 0xFF."""
    content = small_jpegs()["4:2:0"]
    return content[:2] + b"\xff\xff\xff" + content[2:]


def parameterless(marker):
    """Markers without a length are legal anywhere, and the decoder takes them without a warning."""
    content = small_jpegs()["4:2:0"]
    content = content[:2] + marker + content[2:]
    assert check(content, HEIGHT, WIDTH) == OK
    return content


PICTURES = {
    **{kind: lambda kind=kind: small_jpegs()[kind] for kind in small_jpegs()},
    "fill bytes": filled,
    "RST": lambda: parameterless(b"\xff\xd0\xff\xd7"),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_the_size_is_found(kind):
    content = PICTURES[kind]()
    assert Image.open(io.BytesIO(content)).size == (WIDTH, HEIGHT)
    whole = memoryview(b"before" + content + b"after")
    assert states_size(whole[6 : 6 + len(content)], HEIGHT, WIDTH)
    for height, width in ((39, 56), (40, 57), (56, 40), (16, 16), (40 + 256, 56), (0, 0)):
        assert not states_size(content, height, width)


def test_headers_of_real_files_are_those_that_pillow_reads(data_root):
    for path in sorted((data_root / "oddities" / "files").glob("*.jpg")):
        data = path.read_bytes()
        header = read_header(data)
        if path.name == "monkey12.jpg":
            assert (header.marker, header.precision) == (0xC1, 12)
            continue
        with Image.open(io.BytesIO(data)) as image:
            assert (header.width, header.height) == image.size, path.name
            assert (header.marker == 0xC2) == ("progressive" in image.info), path.name
    assert read_header((data_root / "oddities" / "files" / "testimgari.jpg").read_bytes()).marker == 0xC9


def test_what_lies_between_segments_is_skipped(photo):
    expected = Header(0xC0, 8, 37, 61)
    assert read_header(photo) == expected
    thumbnail = photo[:200]  # in a segment of its own: its start of frame is not the picture's
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    for junk in (b"junk", b"\xff\x00", b"\xff\xff\xff", b"\0\xff\x00\xff\xd0\xff\x01"):
        assert read_header(photo[:2] + junk + photo[2:]) == expected
    assert read_header(photo[:2] + segment + photo[2:]) == expected._replace(has_exif=True)
    for data in (b"", photo[:2], photo[1:], b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 9, b"\xff\xd8\xff\xc0\0"):
        assert read_header(data) is None
    assert read_header(b"\xff\xd8\xff\xda\0\2") is None and read_header(b"\xff\xd8\xff\x02" + photo[2:]) is None


def test_damage_behind_the_frame_does_not_matter(photo):
    end = photo.index(SOF0) + 19
    for data in (photo[:end], photo[:end] + bytes(30), photo[:end] + photo[end:-40]):
        assert read_header(data) == Header(0xC0, 8, 37, 61) and states_size(data, 37, 61)
    for data in (photo[: end - 10], photo[: end - 13], photo[: end - 17]):  # nothing is made up behind the end
        assert read_header(data) is None and not states_size(data, 37, 61)


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
    other = photo.replace(SOF0, bytes([0xFF, marker]) + SOF0[2:])
    stored = store_image(other)
    assert isinstance(stored, Reject) and stored.reason.startswith(reason)
    assert check(other, 37, 61) != OK


def test_other_bit_depths_are_refused_by_name(photo):
    other = photo.replace(SOF0 + b"\x08", SOF0 + b"\x0c")
    stored = store_image(other)
    assert isinstance(stored, Reject) and stored.reason.startswith("12-bit JPEG")
    assert check(other, 37, 61) != OK


def test_a_header_with_two_sizes_or_without_end_is_refused(photo):
    start = photo.index(SOF0)
    other = bytearray(photo[start : start + 19])
    other[5:9] = (74).to_bytes(2, "big") + (122).to_bytes(2, "big")
    twice = photo[: start + 19] + bytes(other) + photo[start + 19 :]
    with refusal(ValueError, "convert", "header with two sizes") as caught:
        read_header(twice)
    assert str(caught.value).removeprefix("a JPEG header with ") in store_image(twice).reason
    assert not states_size(twice, 37, 61) and not states_size(twice, 74, 122) and check(twice, 37, 61) != OK
    for endless in (b"\xff\xd8" + b"\xff\xe0\x00\x02" * 20_000, photo[:2] + b"\xff\xfe\x00\x02" * 20_000 + photo[2:]):
        assert "10,000 segments" in store_image(endless).reason and check(endless, 37, 61) != OK
