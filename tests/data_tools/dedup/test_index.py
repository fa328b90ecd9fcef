"""What an index of test images has in it."""

import hashlib
import shutil
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import xxhash
from datasets_on_disk import contents
from dedup_data import NAMES, candidate, index_of, make_photo, source_of, write_photos
from PIL import Image, ImageOps

from data_tools.dedup import building
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.fingerprint import square_luma
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import Candidate
from data_tools.dedup.settings import PRESETS, Settings


def file(path: Path) -> Candidate:
    """An image file as a query."""
    return candidate(path.read_bytes())


def hashes_by_key(index: FingerprintIndex) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    found: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for place, owner in enumerate(index.owners):
        one = int(index.variants[place]), tuple(index.hashes[:, place].tolist())
        found.setdefault(index.keys[int(owner)].as_py(), []).append(one)
    return found


def test_an_index_has_what_the_files_are(photos, made):
    index = FingerprintIndex(made)
    index.verify()
    (one,) = index.test_sets
    assert (one.name, one.source, one.preset, one.level) == ("photos", str(photos), "photo", 1)
    assert (one.images, one.hashes, one.unreadable) == (11, 11 * 8, 0)
    assert one.settings == PRESETS["photo"]
    assert sorted(index.keys.to_pylist()) == NAMES
    for row, key in enumerate(index.keys.to_pylist()):
        pixels = np.asarray(Image.open(photos / key))
        facts = {name: index.images[name][row].as_py() for name in ("sha256", "pixels", "quality", "trim")}
        assert facts == {
            "sha256": hashlib.sha256((photos / key).read_bytes()).digest(),
            "pixels": xxhash.xxh3_64_intdigest(pixels.tobytes(), 260),
            "quality": 100,
            "trim": None,
        }
        assert index.size(row) == (200, 260, None)
        np.testing.assert_array_equal(index.thumbnails[row], square_luma(pixels))
        (picture,) = index.pictures([row])
        small = Image.open(BytesIO(picture))
        assert small.size == (128, 98)
        expected = np.asarray(Image.fromarray(pixels).resize(small.size, Image.Resampling.BOX))
        assert np.corrcoef(np.asarray(small).ravel(), expected.ravel())[0, 1] > 0.99


def test_hashes_are_those_of_the_crops_and_their_mirror_images(photos, made):
    pdqhash = pytest.importorskip("pdqhash")
    index = FingerprintIndex(made)
    assert index.owners.tolist() == sorted(index.owners.tolist())
    of_image = hashes_by_key(index)
    for key in NAMES[:3]:
        image = Image.open(photos / key)
        views = {0: image, 4: image.crop((7, 5, 254, 195)), 2: image.crop((30, 0, 230, 200))}  # whole, 95 %, square
        for code, view in views.items():
            for mirrored in (0, 1):
                luma = square_luma(np.asarray(ImageOps.mirror(view) if mirrored else view))
                expected, _ = pdqhash.compute(np.repeat(luma[:, :, None], 3, axis=2))
                words = np.packbits(expected.astype(np.uint8)).view(np.uint64)
                stored = np.array(dict(of_image[key])[code + mirrored], np.uint64)
                differing = np.unpackbits((stored ^ words).view(np.uint8)).sum()
                # A mirrored picture's means may round the other way.
                assert differing <= (10 if mirrored else 0)


def test_the_index_does_not_depend_on_workers_or_pieces(monkeypatch, tmp_path, photos, made):
    monkeypatch.setattr(building, "_PIECE", 3)
    build_index([source_of(photos, level=1)], tmp_path / "2", workers=2)
    index, whole = index_of(tmp_path / "1", [source_of(photos, level=1)]), FingerprintIndex(made)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert contents(made).keys() == contents(tmp_path / "1").keys()
    assert index.images.equals(whole.images)
    for name in ("hashes", "owners", "variants", "thumbnails"):
        np.testing.assert_array_equal(getattr(index, name), getattr(whole, name))
    pictures = [whole.pictures([row])[0] for row in range(11)]
    assert len(set(pictures)) == 11
    wanted = [10, 3, 4, 3, 0, 8, 7]  # of several pieces, not in order
    assert index.pictures(wanted) == [pictures[row] for row in wanted]
    assert index.pictures([]) == []


def test_several_test_sets_follow_one_another(inline, tmp_path, photos, made):
    index = index_of(tmp_path / "index", [source_of(photos, "a", level=1), source_of(photos, "b", level=0)])
    index.verify()
    whole = FingerprintIndex(made)
    assert [one.name for one in index.test_sets] == ["a", "b"] and [one.images for one in index.test_sets] == [11, 11]
    assert index.first_images.tolist() == [0, 11, 22] and index.first_hashes.tolist() == [0, 88, 110]
    np.testing.assert_array_equal(index.hashes[:, :88], whole.hashes)
    np.testing.assert_array_equal(index.owners, [*whole.owners, *np.repeat(np.arange(11, 22), 2)])
    np.testing.assert_array_equal(index.thumbnails, np.concatenate([whole.thumbnails, whole.thumbnails]))
    assert index.keys.to_pylist() == whole.keys.to_pylist() * 2
    assert [index.set_of(row) for row in (0, 10, 11, 21)] == [0, 0, 1, 1]


def test_what_streams_gives_the_same_hashes(monkeypatch, tmp_path, photos, made):
    packed = tmp_path / "photos.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in reversed(NAMES):
            archive.add(photos / name, name)
    monkeypatch.setattr(building, "_PIECE_BYTES", 300_000)  # two or three of these photos
    source = source_of(packed, level=1)
    assert source.source.streams
    index = index_of(tmp_path / "index", [source])
    assert index.keys.to_pylist() == NAMES[::-1]
    assert hashes_by_key(index) == hashes_by_key(FingerprintIndex(made))


def test_borders_are_in_the_index_and_found_by_it(inline, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    ImageOps.expand(make_photo(5), (0, 30), "black").save(folder / "bars.png")
    index = index_of(tmp_path / "index", [source_of(folder)])
    assert index.size(0) == (260, 260, (30, 0, 200, 260))
    make_photo(5).save(tmp_path / "without.png")
    ((match,),) = Matcher([index]).match([file(tmp_path / "without.png")])
    assert (match.tier, match.distance, match.key) == ("hash", 0, "bars.png")


def test_images_that_cannot_be_decoded_are_known_by_their_bytes(inline, tmp_path, photos):
    folder = tmp_path / "mixed"
    shutil.copytree(photos, folder)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff no more")
    counted = []
    build_index([source_of(folder)], tmp_path / "index", workers=1, tick=lambda *counts: counted.append(counts))
    index = FingerprintIndex(tmp_path / "index")
    assert (index.test_sets[0].images, index.test_sets[0].unreadable) == (12, 1)
    assert counted[-1] == (12, 1)
    row = index.keys.to_pylist().index("broken.jpg")
    assert index.images["pixels"][row].as_py() is None and row not in index.owners and index.pictures([row]) == [b""]
    ((match,),) = Matcher([index]).match([FileOfBytes((folder / "broken.jpg").read_bytes())])
    assert (match.image, match.tier) == (row, "bytes")


class FileOfBytes:
    """A query that cannot be decoded either."""

    pixels, quality, pdq, pdq_trimmed = None, 0, bytes(32), None

    def __init__(self, data: bytes) -> None:
        self.sha256 = hashlib.sha256(data).digest()


def test_exact_test_sets_have_no_hashes_and_match(inline, tmp_path, photos):
    index = index_of(tmp_path / "index", [source_of(photos, preset="exact")])
    assert index.hashes.shape == (4, 0) and index.test_sets[0].hashes == 0
    index.verify()
    same = tmp_path / "same.png"
    Image.open(photos / NAMES[4]).save(same, compress_level=1)
    other = tmp_path / "other.jpg"
    Image.open(photos / NAMES[4]).save(other, quality=95)
    matches = Matcher([index]).match([file(photos / NAMES[3]), file(same), file(other)])
    assert [[(one.tier, one.key) for one in of] for of in matches] == [
        [("bytes", "03.png")],
        [("pixels", "04.png")],
        [],
    ]


def test_exact_and_photo_test_sets_in_one_index(inline, tmp_path, photos):
    sources = [source_of(photos, "exact", "exact"), source_of(photos, "photo", level=0)]
    matcher = Matcher([index_of(tmp_path / "index", sources)])
    edited = tmp_path / "edited.jpg"
    Image.open(photos / NAMES[4]).resize((180, 140)).save(edited, quality=60)
    ((match,),) = matcher.match([file(edited)])
    assert (match.test_set, match.key, match.tier) == (1, "04.png", "hash")


def test_the_preset_goes_by_size_unless_said(inline, tmp_path, photos):
    write_photos(tmp_path / "small", ["a.png", "b.png"], size=(32, 32))
    sources = [source_of(tmp_path / "small", "small"), source_of(tmp_path / "small", "said", "photo", level=0)]
    index = index_of(tmp_path / "index", sources)
    assert [(one.preset, one.level) for one in index.test_sets] == [("small", 3), ("photo", 0)]
    assert index.test_sets[0].settings == PRESETS["small"]


def test_pictures_of_odd_shapes(inline, tmp_path):
    (tmp_path / "odd").mkdir()
    for height, width in ((1, 1), (1, 3000), (3000, 2), (7, 5), (64, 64)):
        make_photo(height, height, width).save(tmp_path / "odd" / f"{height}-{width}.png")
    index = index_of(tmp_path / "index", [source_of(tmp_path / "odd", level=3)])
    assert (index.test_sets[0].images, index.test_sets[0].unreadable) == (5, 0)
    sizes = {f"{index.size(row)[0]}-{index.size(row)[1]}.png" for row in range(5)}
    assert sizes == set(index.keys.to_pylist())


def test_settings_may_be_given(inline, tmp_path, photos):
    one = source_of(photos, level=0)
    settings = Settings(distance=10, candidates=40, correlation=0.97)
    index = index_of(tmp_path / "index", [TestSource(one.name, one.src, one.source, level=0, settings=settings)])
    assert index.test_sets[0].settings == settings
