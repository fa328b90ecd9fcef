import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from dedup_data import make_photo
from PIL import Image

from data_tools.dedup.fingerprint import fingerprint, pdq_hashes, square_luma

pdqhash = pytest.importorskip("pdqhash", reason="pdqhash is not installed (pip install pdqhash)")


def of_the_library(lumas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bits, one a byte, and qualities as Meta's own code computes them."""
    results = [pdqhash.compute(np.repeat(luma[:, :, None], 3, axis=2)) for luma in lumas]
    return np.array([bits for bits, _ in results], np.uint8), np.array([quality for _, quality in results])


def made_lumas() -> np.ndarray:
    """uint8 (N, 64, 64): noise of several strengths, gradients, steps, flat pictures, synthetic photos."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:64, 0:64]
    noise = [128 + strength * rng.standard_normal((64, 64)) for strength in (0.3, 1, 3, 10, 30, 90) for _ in range(20)]
    waves = [128 + a * np.sin(x / f) + a * np.cos(y / g) for a in (2, 20, 60) for f, g in ((3, 9), (7, 2), (20, 11))]
    others = [x * 4, y * 4, (x + y) * 2, 255 - x * 4, (x > 31) * 255, (y > 20) * 90, 0 * x, 0 * x + 1, 0 * x + 255]
    photos = [square_luma(np.asarray(make_photo(seed))) for seed in range(30)]
    return np.stack([np.clip(one, 0, 255).astype(np.uint8) for one in (*noise, *waves, *others, *photos)])


@pytest.fixture(scope="module")
def grocery_lumas(data_root: Path) -> np.ndarray:
    """uint8 (100, 64, 64) of real photos."""
    with tarfile.open(data_root / "grocery" / "test_dev.tar") as archive:
        files = [member for member in archive if member.isfile() and member.name.endswith(".jpg")][:100]
        photos = [Image.open(BytesIO(archive.extractfile(file).read())).convert("RGB") for file in files]
    return np.stack([square_luma(np.asarray(photo)) for photo in photos])


def test_made_pictures_hash_as_with_the_library():
    lumas = made_lumas()
    bits, qualities = of_the_library(lumas)
    hashes, own_qualities = pdq_hashes(lumas)
    assert hashes.shape == (len(lumas), 32) and hashes.dtype == np.uint8 and own_qualities.dtype == np.uint8
    np.testing.assert_array_equal(np.unpackbits(hashes, axis=1), bits)
    np.testing.assert_array_equal(own_qualities, qualities)
    assert {0, 100} < set(own_qualities.tolist())  # flat, in between, rich


def test_photos_hash_as_with_the_library(grocery_lumas):
    both_ways = np.concatenate([grocery_lumas, grocery_lumas[:, :, ::-1]])
    bits, qualities = of_the_library(both_ways)
    hashes, own_qualities = pdq_hashes(both_ways)
    np.testing.assert_array_equal(np.unpackbits(hashes, axis=1), bits)
    np.testing.assert_array_equal(own_qualities, qualities)


def test_bits_are_those_of_an_exact_transform():
    fft = pytest.importorskip("scipy.fft")
    lumas = made_lumas()[-30:]
    hashes, _ = pdq_hashes(lumas)
    lowest = fft.dctn(lumas.astype(np.float64), axes=(1, 2), norm="ortho")[:, 1:17, 1:17].reshape(-1, 256)
    median = np.sort(lowest, axis=1)[:, 127:128]
    sure = np.abs(lowest - median) > 1e-3  # further from the median than float32 errs
    assert sure.mean() > 0.99
    bits = np.unpackbits(hashes, axis=1)[:, ::-1].astype(bool)
    np.testing.assert_array_equal(bits[sure], (lowest > median)[sure])


def test_no_pictures_have_no_hashes():
    hashes, qualities = pdq_hashes(np.empty((0, 64, 64), np.uint8))
    assert hashes.shape == (0, 32) and qualities.shape == (0,)


def test_metas_versions_of_one_photo_are_near_and_another_photo_is_far(data_root):
    folder = data_root / "near_duplicate_photos"

    def bits(path: Path) -> np.ndarray:
        found = fingerprint(np.asarray(Image.open(path).convert("RGB")))
        assert found.quality >= 50
        return np.unpackbits(np.frombuffer(found.pdq, np.uint8))

    original = bits(folder / "bridge" / "aaa-orig.jpg")
    distances = {path.name: int((bits(path) != original).sum()) for path in (folder / "bridge").glob("*.jpg")}
    assert len(distances) == 12
    assert max(distances.values()) <= 31, distances
    assert (bits(folder / "other" / "pen-and-coaster.png") != original).sum() > 100
