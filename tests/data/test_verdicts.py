"""One verdict on an image: conversion passes through what verification finds clean and training decodes."""

import io
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from damaged_jpegs import HEIGHT, WIDTH, damaged_jpegs, small_jpegs
from PIL import Image
from views import kernel_views

from vitscale.data.shards import ShardFile, StoredSample, write_shard
from vitscale.data.shards.images import Reject, StoredImage, store_image
from vitscale.data.shards.scan import scan
from vitscale.ground.images import OK, REFUSED, WRONG_SIZE, check, decode, read_header, states_size

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def stated_size(jpeg, height, width):
    """Of its header, as far as a shard can state it; these where it has none."""
    try:
        header = read_header(jpeg)
    except ValueError:
        header = None
    return (header.height, header.width) if header and header.height * header.width else (height, width)


def compare(jpegs, path):
    """How many of the files are good, as they are, in a shard that states the size of their headers.

    Fails where `check`, verification, and training, whole and halved, disagree.
    """
    sizes = [stated_size(jpeg, HEIGHT, WIDTH) for jpeg in jpegs]
    samples = [StoredSample(jpeg, *size, 0, uid) for uid, (jpeg, size) in enumerate(zip(jpegs, sizes, strict=True))]
    write_shard(path, samples, len(samples))
    with ShardFile(path) as shard:
        verified = scan(shard, decode=True)
        assert verified.crc.tolist() == [google_crc32c.value(jpeg) for jpeg in jpegs]
    checked = [check(jpeg, *size) for jpeg, size in zip(jpegs, sizes, strict=True)]
    assert verified.status.tolist() == checked
    # Without decoding: never wrong about a good one, and a size that is not stated is none for the decoder either.
    is_sized = verified.is_sized.tolist()
    assert all(sized for sized, status in zip(is_sized, checked, strict=True) if status == OK)
    assert all(status != OK for sized, status in zip(is_sized, checked, strict=True) if not sized)
    rng = np.random.default_rng(0)
    for jpeg, (height, width), status in zip(jpegs, sizes, checked, strict=True):
        stored = store_image(jpeg)
        if isinstance(stored, StoredImage):  # passed through or written anew: what is stored is good
            if stored.passed_through:
                assert stored.jpeg == jpeg and np.array_equal(decode(jpeg, height, width)[1], stored.pixels)
            assert check(stored.jpeg, stored.height, stored.width) == OK
        assert (isinstance(stored, StoredImage) and stored.passed_through) == (status == OK and is_upright(jpeg))
        assert decode(jpeg, height, width)[0] == decode(jpeg, height, width, exact=True)[0] == status
        h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
        box = (rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w)
        for side, may_scale in ((16, False), (8, True)):
            of_views, seen = kernel_views(jpeg, height, width, [(0, 0, height, width), box], side, may_scale=may_scale)
            # No view of a good image is refused, and none shows a pixel of what is not in order.
            assert of_views[0] == status and (status != OK or of_views[1] == OK)
            assert set(of_views.tolist()) <= {OK, REFUSED, WRONG_SIZE} and not seen[of_views != OK].any()
    return checked.count(OK)


def is_upright(jpeg):
    """By Pillow, which alone reads what a camera says of how it was held; where it reads nothing, so it is taken."""
    header = read_header(jpeg)
    if header is None or not header.has_exif:
        return True
    try:
        with Image.open(io.BytesIO(jpeg)) as image:
            return image.getexif().get(0x0112, 1) in (0, 1) and image.size == (header.width, header.height)
    except Exception:
        return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [3000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_of_damaged_files(tmp_path, count):
    files = [jpeg for jpeg in damaged_jpegs(count) if jpeg]  # a shard holds no empty ones
    good = compare(files, tmp_path / "shard.beton")
    assert count / 20 < good < count / 2  # enough of both


@pytest.mark.filterwarnings("ignore")
def test_of_real_files(data_root, tmp_path):
    files = [path.read_bytes() for path in sorted((data_root / "oddities" / "files").iterdir())]
    files = [file for file in files if file.startswith(b"\xff\xd8")]
    assert compare(files, tmp_path / "shard.beton") >= 12


@pytest.mark.filterwarnings("ignore")
def test_of_what_a_fuzzer_made(tmp_path):
    """Of an hour of fuzzing, enough files to reach every branch, ours and libjpeg-turbo's, that all of them reach."""
    files = [path.read_bytes() for path in sorted((REPOSITORY / "tests" / "images" / "corpus").iterdir())]
    good = compare([file for file in files if file], tmp_path / "shard.beton")
    assert 10 < good < len(files) - 100


def test_of_sound_files(tmp_path):
    kinds = small_jpegs()
    # Any marker may be preceded by further 0xFF, and those without a length are legal anywhere.
    before = {"fill bytes": b"\xff\xff\xff", "RST": b"\xff\xd0\xff\xd7"}
    kinds |= {name: kinds["4:2:0"][:2] + markers + kinds["4:2:0"][2:] for name, markers in before.items()}
    assert all(states_size(jpeg, HEIGHT, WIDTH) for jpeg in kinds.values())
    assert compare(list(kinds.values()), tmp_path / "shard.beton") == len(kinds) - 1  # all but CMYK


def test_of_files_that_are_no_jpegs(tmp_path):
    """Such a file never gets into a shard as it is; if it were there, nobody would take it for an image."""
    sound = small_jpegs()["4:2:0"]
    for content in (b"", b"\0", b"\xff\xd8", sound[2:], sound[:-2], b"\x89PNG\r\n\x1a\n" + sound):
        assert check(content, HEIGHT, WIDTH) not in (OK, WRONG_SIZE) and not states_size(content[:20], HEIGHT, WIDTH)
        assert isinstance(store_image(content), Reject)
    for kind, jpeg in small_jpegs().items():
        for end in (len(jpeg) // 4, len(jpeg) // 2, len(jpeg) * 9 // 10, len(jpeg) - 2):
            assert check(jpeg[:end], HEIGHT, WIDTH) not in (OK, WRONG_SIZE), (kind, end)
