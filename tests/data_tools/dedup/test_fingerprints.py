"""Fingerprints: squares of luma and borders, Meta's PDQ hashes, near pairs as faiss finds them, and crops."""

from io import BytesIO
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np
import pdqhash
import pytest
from dedup_data import make_photo
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encoded
from PIL import Image, ImageOps

from data_tools.dedup.fingerprint import Box, fingerprint, pdq_hashes, square_luma, trimmed
from data_tools.dedup.matching import near_pairs, words
from data_tools.dedup.variants import CROPS, LEVELS, crops_of, variant_name, window_of
from vitscale.ground import native


def after_jpeg(image: Image.Image) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(encoded(image, quality=75))))


def overlaps(size: int) -> np.ndarray:
    """float64 (64, size): which share of the mean over each 64th of a side comes from each pixel."""
    starts, pixels = np.arange(64)[:, None] * size / 64, np.arange(size)[None]
    lengths = np.minimum(starts + size / 64, pixels + 1) - np.maximum(starts, pixels)
    return np.clip(lengths, 0, None) / (size / 64)


def area_means(rgb: np.ndarray) -> np.ndarray:
    """float64 (64, 64): what each pixel of the square covers, averaged."""
    gray = rgb.astype(np.float64) @ (0.299, 0.587, 0.114)
    return overlaps(rgb.shape[0]) @ gray @ overlaps(rgb.shape[1]).T


# A side below 64 pixels, of 64, above it, a multiple and none; and both ways.
SIDES = st.sampled_from([1, 2, 5, 17, 63, 64, 65, 127, 128, 192, 300, 777, 1031])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SIDES, SIDES)
def test_every_size_is_means_of_areas(height, width):
    rng = np.random.default_rng(height * 2000 + width)
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    for rgb in (np.asarray(make_photo(7, height, width)), noise, np.where(noise > 127, 255, 0).astype(np.uint8)):
        luma = square_luma(rgb)
        assert luma.shape == (64, 64) and luma.dtype == np.uint8
        # Rounded once; float64 may fall to the other side of a half.
        assert np.abs(luma - area_means(rgb)).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("shape", [(70_000, 3, 3), (3, 70_000, 3), (6_000, 5_000, 3)])
def test_large_white_pictures_do_not_overflow(shape):
    np.testing.assert_array_equal(square_luma(np.full(shape, 255, np.uint8)), 255)


def test_pixels_repeated_change_nothing():
    """Crops of small pictures are of such: by means of areas they are what the small picture shows."""
    for height, width in ((30, 40), (1, 7), (63, 65), (200, 90)):
        rgb = np.asarray(make_photo(9, height, width))
        for factor in (2, 3, 5):
            np.testing.assert_array_equal(square_luma(rgb.repeat(factor, 0).repeat(factor, 1)), square_luma(rgb))


@pytest.mark.parametrize("smoothing", [Image.Resampling.BOX, Image.Resampling.LANCZOS])
def test_thin_pictures_keep_their_hash_when_their_size_changes(smoothing):
    """One side below 64 pixels, above it in the other size: 40 x 300 and 128 x 960 show the same."""
    for seed in range(12):
        large = make_photo(seed, 128, 960)
        small = large.resize((300, 40), smoothing)
        for one, other in ((small, large), (small.rotate(90, expand=True), large.rotate(90, expand=True))):
            hashes, qualities = pdq_hashes(np.stack([square_luma(np.asarray(one)), square_luma(np.asarray(other))]))
            assert qualities.min() >= 50
            assert np.unpackbits(hashes[0] ^ hashes[1]).sum() <= 31


def test_a_box_is_as_a_picture_of_its_own():
    rgb = np.asarray(make_photo(8))
    box = Box(11, 23, 150, 201)
    own = np.ascontiguousarray(rgb[11:161, 23:224])
    np.testing.assert_array_equal(square_luma(rgb, box), square_luma(own))
    np.testing.assert_array_equal(square_luma(rgb[:, ::-1]), square_luma(np.ascontiguousarray(rgb[:, ::-1])))


@pytest.mark.parametrize(
    ("left", "top", "right", "bottom"),
    [(15, 15, 15, 15), (0, 40, 0, 40), (31, 0, 29, 0), (0, 0, 0, 25), (20, 7, 0, 12)],
)
def test_uniform_borders_are_found_after_jpeg(left, top, right, bottom):
    for seed, colour in enumerate(("white", "black", "navy", "khaki")):
        rgb = after_jpeg(ImageOps.expand(make_photo(seed), (left, top, right, bottom), colour))
        box = trimmed(rgb)
        assert box is not None
        edges = (box.top, box.left, box.top + box.height, box.left + box.width)
        np.testing.assert_allclose(edges, (top, left, top + 200, left + 260), atol=2)


def test_bars_of_two_colours_are_found():
    photo = ImageOps.expand(ImageOps.expand(make_photo(3), (0, 0, 0, 20), "white"), (0, 30, 0, 0), "black")
    box = trimmed(after_jpeg(photo))
    np.testing.assert_allclose(box, (30, 0, 200, 260), atol=2)


def test_pictures_without_borders_and_of_little_else_are_left_alone():
    photos = [make_photo(seed) for seed in range(20)]
    small = ImageOps.expand(make_photo(4, 90, 90), 60, "white")  # less than half would be left
    others = [small, Image.new("RGB", (70, 50), (200, 200, 200)), Image.new("RGB", (1, 1))]
    for picture in [*photos, *others]:
        assert trimmed(after_jpeg(picture)) is None


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


def test_made_pictures_hash_as_with_the_library():
    lumas = made_lumas()
    bits, qualities = of_the_library(lumas)
    hashes, own_qualities = pdq_hashes(lumas)
    assert hashes.shape == (len(lumas), 32) and hashes.dtype == np.uint8 and own_qualities.dtype == np.uint8
    np.testing.assert_array_equal(np.unpackbits(hashes, axis=1), bits)
    np.testing.assert_array_equal(own_qualities, qualities)
    assert {0, 100} < set(own_qualities.tolist())  # flat, in between, rich


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


def made_hashes(count: int, seed: int) -> np.ndarray:
    """uint8 (count, 32): some at random, most of them a few or many bits away from one of a handful."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).integers(0, 2, (7, 256), np.uint8)
    flips = rng.random((count, 256)) < rng.uniform(0, 0.4, (count, 1))
    return np.packbits(centres[rng.integers(0, 7, count)] ^ flips, axis=1)


def by_query(queries: np.ndarray, hits: np.ndarray, distances: np.ndarray) -> list[tuple[int, int, int]]:
    return sorted(zip(queries.tolist(), hits.tolist(), distances.tolist(), strict=True))


def of_faiss(queries: np.ndarray, index: np.ndarray, limit: int) -> list[tuple[int, int, int]]:
    flat = faiss.IndexBinaryFlat(256)
    flat.add(index)
    ends, distances, hits = flat.range_search(queries, limit + 1)  # it wants less than
    return by_query(np.repeat(np.arange(len(queries)), np.diff(ends.astype(np.int64))), hits, distances)


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2048, 3000])
@pytest.mark.parametrize("limit", [0, 31, 90])
def test_finds_the_pairs_that_faiss_finds(size, limit):
    index, queries = made_hashes(size, 1), made_hashes(40, 2)
    index[::5] = queries[np.arange(len(index[::5])) % 40]  # equal ones, too
    found = by_query(*near_pairs(words(queries), words(index), limit))
    assert found == of_faiss(queries, index, limit)
    assert found


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1024), (1, 1025), (1000, 2000), (1024, 2500), (700, 700), (2500, None)]
)
def test_looks_at_a_part_of_the_index_only(start, stop):
    index, queries = made_hashes(2500, 5), made_hashes(20, 6)
    expected = [pair for pair in of_faiss(queries, index, 90) if start <= pair[1] < (2500 if stop is None else stop)]
    assert by_query(*near_pairs(words(queries), words(index), 90, start, stop)) == expected


def test_more_pairs_than_there_was_room_for():
    index, queries = made_hashes(2000, 7), made_hashes(50, 8)
    rows, hits, distances = near_pairs(words(queries), words(index), 256)
    assert len(rows) == 100_000
    assert by_query(rows, hits, distances) == of_faiss(queries, index, 256)


def test_nothing_to_compare():
    none, some = words(np.empty((0, 32), np.uint8)), words(made_hashes(3, 9))
    assert none.shape == (4, 0)
    for queries, index in ((none, some), (some, none), (none, none)):
        assert [len(column) for column in near_pairs(queries, index, 256)] == [0, 0, 0]


@pytest.mark.parametrize("kind", [1, 2])
def test_processors_without_newer_instructions_find_the_same(kind):
    index, queries = words(made_hashes(2501, 1)), words(made_hashes(40, 2))
    sides = queries.ctypes.data, 40, index.ctypes.data, 2501
    pairs = np.empty((100_000, 3), np.int64)
    found = native.load().vitscale_near_pairs(*sides, 90, 1, 2500, pairs.ctypes.data, len(pairs), kind)
    assert by_query(*pairs[:found].T) == by_query(*near_pairs(queries, index, 90, 1, 2500))


SIZES = [(200, 260), (300, 200), (128, 128), (32, 32), (17, 90), (1, 1), (1000, 40)]


@pytest.mark.parametrize(("level", "count"), list(enumerate([2, 8, 16, 96])))
def test_levels_have_the_published_number_of_distinct_variants(level, count):
    assert 2 * LEVELS[level] == count
    windows = {window_of(code, 300, 400, None) for code in range(0, count, 2)}
    assert len(windows) == count // 2
    assert len({variant_name(code) for code in range(count)}) == count


def test_levels_build_on_each_other():
    photo = np.asarray(make_photo(0))
    boxes = [dict(crops_of(photo, level)[1]) for level in range(len(LEVELS))]
    for fewer, more in pairwise(boxes):
        assert fewer.items() < more.items()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_crops_lie_in_the_picture_and_are_the_windows_said(height, width):
    picture, crops = crops_of(np.asarray(make_photo(1, height, width)), len(LEVELS) - 1)
    tall, wide, _ = picture.shape
    assert tall % height == 0 and tall // height == wide // width
    boxes = [box for _, box in crops]
    assert len(set(boxes)) == len(boxes)
    assert crops[0] == (0, Box(0, 0, tall, wide))
    for number, box in crops:
        assert box.top >= 0 and box.left >= 0 and box.height >= 1 and box.width >= 1
        assert box.top + box.height <= tall and box.left + box.width <= wide
        window = window_of(2 * number, height, width, None)
        assert window == window_of(2 * number + 1, height, width, None)
        expected = (window.top * tall, window.left * wide, window.height * tall, window.width * wide)
        np.testing.assert_allclose(box, expected, atol=1)


def test_small_pictures_are_enlarged_so_that_crops_differ():
    small = np.asarray(make_photo(2, 32, 32))
    picture, crops = crops_of(small, 3)
    assert picture.shape == (128, 128, 3)
    # Of a square picture, the two centred squares are crops that there are already: whole, and 87.5 % of it.
    assert len(crops) == len(CROPS) - 1
    assert crops_of(small, 0)[0].shape == (32, 32, 3)
    long = np.zeros((2, 5000, 3), np.uint8)  # would be enlarged beyond measure
    assert crops_of(long, 3)[0].shape == long.shape


def test_the_trimmed_picture_comes_after_the_crops():
    code = 2 * len(CROPS)
    assert window_of(code, 100, 200, Box(10, 20, 80, 150)) == (0.1, 0.1, 0.8, 0.75)
    assert variant_name(code) == "trimmed" and variant_name(code + 1) == "trimmed, mirrored"
    assert code + 1 < 256  # a byte has to hold it
