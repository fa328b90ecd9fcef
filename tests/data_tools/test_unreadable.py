import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitscale.data.shards.images import Reject, store_image

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x20ftypisom", "a video"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"<?xml version='1.0'?>\n<!-- drawn -->\n<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\xef\xbb\xbf\r\n<!DOCTYPE html><html><body>404", "a web page"),
        (b"<HTML><HEAD>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", 'text, not an image; the file begins with b"<?xml'),
        (b'{"error": "quota"}', "text, not an image; the file begins with b'{\"error"),
        (b"%PDF-1.7", "a PDF document"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (bytes(5000), "nothing but zero bytes"),
        (b"PK\x03\x04", "a zip archive"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "a drawing (EPS)"),
        (b"\xff\xd8\xff", "not an image that Pillow knows; the file begins with b'\\xff\\xd8\\xff'"),
    ],
)
def test_files_that_are_no_images_are_named(data, reason):
    stored = store_image(data)
    assert isinstance(stored, Reject) and reason in stored.reason


def test_a_machine_that_cannot_decode_ends_a_conversion(image_folder, tmp_path):
    """The images are not at fault: none may be counted as unreadable, however many a conversion may reject."""
    for package in ("vitscale", "data_tools"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    program = "from vitscale.cli.entry import convert; convert()"
    command = [sys.executable, "-c", program, str(image_folder), str(tmp_path / "out"), "--max-reject-rate", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "not compiled" in done.stderr, done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
