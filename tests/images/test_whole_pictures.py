"""Whole pictures: bit for bit those of stock FFCV, and nearly those of Pillow."""

import numpy as np
import pytest
from damaged_jpegs import HEIGHT, WIDTH, small_jpegs
from pictures import encoded
from PIL import Image
from python_processes import run_python
from stock_ffcv import ffcv_decode

from vitscale.ground.images import OK, REFUSED, WRONG_SIZE, check, decode, read_header

SOUND = [kind for kind in small_jpegs() if kind != "CMYK"]


@pytest.mark.parametrize("kind", SOUND)
def test_pixels_are_those_of_ffcv(kind):
    jpeg = small_jpegs()[kind]
    status, rgb = decode(jpeg, HEIGHT, WIDTH)
    assert status == check(jpeg, HEIGHT, WIDTH) == OK
    assert np.array_equal(rgb, ffcv_decode(jpeg, HEIGHT, WIDTH))


def test_pixels_of_photos_are_those_of_ffcv(data_root):
    for path in sorted((data_root / "oddities" / "files").glob("*.jpg")):
        content = path.read_bytes()
        height, width = read_header(content)[2:4]
        expected = ffcv_decode(content, height, width)
        status, rgb = decode(content, height, width)
        assert (status == OK) == (expected is not None) or path.name == "testimgari.jpg"  # arithmetic: never taken
        assert status != OK or np.array_equal(rgb, expected), path.name


def test_decodes_gray_to_rgb():
    for form in (bytes, bytearray, memoryview, lambda content: np.frombuffer(content, np.uint8)):
        status, rgb = decode(form(encoded(Image.new("L", (16, 8), 77))), 8, 16)
        assert status == OK and (rgb == 77).all()


def test_damage_has_a_status(photos):
    jpeg = photos[0]
    for damaged in (b"", jpeg[: len(jpeg) // 2], bytes(len(jpeg)), jpeg[:-2]):
        assert decode(damaged, 40, 64)[0] == check(damaged, 40, 64) == REFUSED


def test_another_size_is_refused(photos):
    for size in ((41, 64), (40, 63), (64, 40), (20, 32), (0, 64), (40, 0)):
        assert decode(photos[0], *size)[0] == check(photos[0], *size) == WRONG_SIZE


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
    ("modules", "absent"),
    [
        (
            "vitscale.data.shards.scan, vitscale.data.shards.contact_sheet",
            {"torch", "ffcv", "cv2", "numba", "llvmlite"},
        ),
        ("vitscale.data", {"ffcv", "cv2", "numba", "llvmlite"}),  # nothing to be compiled before the first batch
        ("data_tools.conversion, data_tools.dedup.finding", {"torch", "ffcv", "cv2", "numba", "llvmlite"}),
    ],
)
def test_heavy_packages_are_not_imported(modules, absent):
    assert run_python(f"import sys, {modules}; print(*{absent} & set(sys.modules))").strip() == ""
