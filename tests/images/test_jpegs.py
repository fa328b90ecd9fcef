"""JPEGs: their headers, whole pictures bit for bit as stock FFCV's and nearly Pillow's, and what is written."""

import io

import numpy as np
import pytest
from damaged_jpegs import HEIGHT, WIDTH, small_jpegs
from messages import refusal
from pictures import encoded, make_picture
from PIL import Image
from processes import run_python
from stock_ffcv import ffcv_decode

from vitscale.data.shards.images import Reject, store_image
from vitscale.ground.images import OK, REFUSED, Header, check, decode, encode, read_header, states_size

SOF0 = b"\xff\xc0\x00\x11"


@pytest.fixture(scope="module")
def photo() -> bytes:
    return encoded(make_picture(5, 37, 61), quality=90)


def test_real_files_have_pillows_headers_and_ffcvs_pixels(data_root):
    for path in sorted((data_root / "oddities" / "files").glob("*.jpg")):
        content = path.read_bytes()
        header = read_header(content)
        expected = ffcv_decode(content, header.height, header.width)
        status, rgb = decode(content, header.height, header.width)
        assert (status == OK) == (expected is not None) or path.name == "testimgari.jpg"  # arithmetic: never taken
        assert status != OK or np.array_equal(rgb, expected), path.name
        if path.name == "monkey12.jpg":
            assert (header.marker, header.precision) == (0xC1, 12)
            continue
        with Image.open(io.BytesIO(content)) as image:
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


@pytest.mark.parametrize("kind", [kind for kind in small_jpegs() if kind != "CMYK"])
def test_pixels_are_those_of_ffcv_whatever_holds_the_bytes(kind):
    jpeg = small_jpegs()[kind]
    for form in (bytes, bytearray, memoryview, lambda content: np.frombuffer(content, np.uint8)):
        status, rgb = decode(form(jpeg), HEIGHT, WIDTH)
        assert status == check(form(jpeg), HEIGHT, WIDTH) == OK
        assert np.array_equal(rgb, ffcv_decode(jpeg, HEIGHT, WIDTH))


def test_tables_of_another_file_are_not_used(photos):
    """A decoder that is kept from one file to the next has them still: then a verdict depends on what came before."""
    jpeg = photos[0]
    start = jpeg.index(b"\xff\xdb")
    without = jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]
    assert check(jpeg, 40, 64) == OK and check(without, 40, 64) == REFUSED


def gray_in_scans(count):
    """One block of 8 x 8 pixels, progressive, in so many scans of two bytes each: bit after bit of each coefficient."""

    def segment(marker, content):
        return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content

    one_code = bytes([1] + [0] * 15) + b"\0"  # a bit 0: no coefficient, or the end of the block
    bits = [(k, k, 16 * ((low + 1) % 14) + low) for k in range(1, 64) for low in range(13, -1, -1)]
    scans = [(0, 0, 0), *bits][:count]
    return b"".join(
        [
            *(b"\xff\xd8", segment(0xDB, bytes(1) + b"\1" * 64), segment(0xC2, bytes.fromhex("080008000801011100"))),
            *(segment(0xC4, b"\x00" + one_code), segment(0xC4, b"\x10" + one_code)),
            *(segment(0xDA, bytes([1, 1, 0, *scan])) + b"\x7f" for scan in scans),
            b"\xff\xd9",
        ]
    )


def test_a_file_of_countless_scans_is_refused():
    """Each goes over all pixels: a few kilobytes would keep a processor busy for minutes."""
    for count, expected in ((1, OK), (500, OK), (501, REFUSED), (800, REFUSED)):
        jpeg = gray_in_scans(count)
        assert check(jpeg, 8, 8) == expected, count
        assert ffcv_decode(jpeg, 8, 8) is not None  # nothing else is wrong with it


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        ("vitscale.data.shards.scan, vitscale.data.shards.contact_sheet", set()),
        ("vitscale.data", {"torch"}),  # nothing to be compiled before the first batch
        ("data_tools.conversion, data_tools.dedup.finding", set()),
    ],
)
def test_heavy_packages_are_not_imported(modules, allowed):
    absent = {"torch", "ffcv", "cv2", "numba", "llvmlite"} - allowed
    assert run_python(f"import sys, {modules}; print(*{absent} & set(sys.modules))").strip() == ""


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("quality", [1, 75, 90, 95, 100])
def test_written_as_pillow_writes(quality):
    picture = make_picture(2, 45, 50)
    written = encode(np.asarray(picture), quality)
    assert check(written, 45, 50) == OK
    with opened(written) as ours, opened(encoded(picture, quality=quality, subsampling="4:4:4")) as theirs:
        assert ours.quantization == theirs.quantization and ours.layer == theirs.layer
        assert np.abs(np.asarray(ours).astype(int) - np.asarray(theirs)).mean() < 0.1
        assert set(ours.info) <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi"}


def test_the_worst_pictures_fit():
    rng = np.random.default_rng(0)
    for shape in ((8, 8, 3), (1, 1, 3), (9, 17, 3), (64, 64, 3)):
        for _ in range(10):
            pixels = (rng.integers(0, 2, shape) * 255).astype(np.uint8)
            assert check(encode(pixels, 100), *shape[:2]) == OK


def test_extreme_sides():
    for shape in ((1, 65500, 3), (65500, 1, 3), (1, 1, 3)):
        with opened(encode(np.full(shape, 200, np.uint8), 95)) as image:
            assert image.size == (shape[1], shape[0]) and np.abs(np.asarray(image).astype(int) - 200).max() <= 1
    for shape in ((1, 65501, 3), (65501, 1, 3), (0, 1, 3), (1, 0, 3)):
        with pytest.raises(ValueError, match=rf"{shape[1]}.*{shape[0]}|{shape[0]}.*{shape[1]}"):
            encode(np.zeros(shape, np.uint8), 95)
