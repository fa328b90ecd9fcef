"""What an index of test images has in it, how it is built, and folders that are none or a damaged one."""

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pdqhash
import pytest
import xxhash
from datasets_on_disk import contents
from dedup_data import NAMES, candidate, index_of, make_photo, source_of
from messages import OF_PYDANTIC, assert_messages
from pictures import encoded
from PIL import Image, ImageOps
from small_files import write_files, write_tar

from data_tools.dedup import building
from data_tools.dedup.building import TestSource, build_index
from data_tools.dedup.fingerprint import square_luma
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matching import Matcher
from data_tools.dedup.settings import PRESETS, Settings
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import durable_folder


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


@pytest.fixture
def packed(tmp_path, photos) -> Path:
    """The photos in a tar that has to be streamed, the last first."""
    files = ((name, (photos / name).read_bytes()) for name in reversed(NAMES))
    return write_tar(tmp_path / "photos.tar.gz", *files, mode="w:gz")


def test_what_streams_gives_the_same_hashes(monkeypatch, tmp_path, packed, made):
    monkeypatch.setattr(building, "_PIECE_BYTES", 300_000)  # two or three of these photos
    source = source_of(packed, level=1)
    assert source.source.streams
    index = index_of(tmp_path / "index", [source])
    assert index.keys.to_pylist() == NAMES[::-1]
    assert hashes_by_key(index) == hashes_by_key(FingerprintIndex(made))


def test_borders_are_in_the_index_and_found_by_it(inline, tmp_path):
    bars = encoded(ImageOps.expand(make_photo(5), (0, 30), "black"), "PNG")
    index = index_of(tmp_path / "index", [source_of(write_files(tmp_path / "photos", ("bars.png", bars)))])
    assert index.size(0) == (260, 260, (30, 0, 200, 260))
    ((match,),) = Matcher([index]).match([candidate(encoded(make_photo(5), "PNG"))])
    assert (match.tier, match.distance, match.key) == ("hash", 0, "bars.png")


def test_images_that_cannot_be_decoded_are_known_by_their_bytes(inline, tmp_path, photos):
    folder = shutil.copytree(photos, tmp_path / "mixed")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff no more")
    counted = []
    build_index([source_of(folder)], tmp_path / "index", workers=1, tick=lambda *counts: counted.append(counts))
    index = FingerprintIndex(tmp_path / "index")
    assert (index.test_sets[0].images, index.test_sets[0].unreadable) == (12, 1)
    assert counted[-1] == (12, 1)
    row = index.keys.to_pylist().index("broken.jpg")
    assert index.images["pixels"][row].as_py() is None and row not in index.owners and index.pictures([row]) == [b""]
    broken = replace(candidate(encoded(make_photo(99))), sha256=hashlib.sha256(b"\xff\xd8\xff no more").digest())
    ((match,),) = Matcher([index]).match([broken])
    assert (match.image, match.tier) == (row, "bytes")


def test_exact_test_sets_have_no_hashes_and_match(inline, tmp_path, photos):
    index = index_of(tmp_path / "index", [source_of(photos, preset="exact")])
    assert index.hashes.shape == (4, 0) and index.test_sets[0].hashes == 0
    index.verify()
    photo = Image.open(photos / NAMES[4])
    files = (photos / NAMES[3]).read_bytes(), encoded(photo, "PNG", compress_level=1), encoded(photo, quality=95)
    matches = Matcher([index]).match([candidate(content) for content in files])
    told = [[(one.tier, one.key) for one in of] for of in matches]
    assert told == [[("bytes", "03.png")], [("pixels", "04.png")], []]


def test_pictures_of_odd_shapes(inline, tmp_path):
    shapes = ((1, 1), (1, 3000), (3000, 2), (7, 5), (64, 64))
    files = ((f"{height}-{width}.png", encoded(make_photo(height, height, width), "PNG")) for height, width in shapes)
    index = index_of(tmp_path / "index", [source_of(write_files(tmp_path / "odd", *files), level=3)])
    assert (index.test_sets[0].images, index.test_sets[0].unreadable) == (5, 0)
    sizes = {f"{index.size(row)[0]}-{index.size(row)[1]}.png" for row in range(5)}
    assert sizes == set(index.keys.to_pylist())


def test_settings_may_be_given(inline, tmp_path, photos):
    one = source_of(photos, level=0)
    settings = Settings(distance=10, candidates=40, correlation=0.97)
    index = index_of(tmp_path / "index", [TestSource(one.name, one.src, one.source, level=0, settings=settings)])
    assert index.test_sets[0].settings == settings


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_place_that_is_taken_is_left_alone(tmp_path, photos):
    write_files(tmp_path / "out", "thesis.txt")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.txt", tmp_path / "out" / "thesis.txt" / "below"):
        with pytest.raises(RecipeError, match="--out"):
            build_index([source_of(photos)], out, workers=1)
    with pytest.raises(RecipeError, match="s3://bucket/index"):
        build_index([source_of(photos)], "s3://bucket/index", workers=1)
    assert contents(tmp_path / "out") == {"thesis.txt": b"thesis.txt"}
    assert names_in(tmp_path) == ["out"]


def test_an_empty_folder_may_be_used_and_so_may_a_link_to_one(inline, tmp_path, photos):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    index_of(tmp_path / "link", [source_of(photos, preset="exact")])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "index.json").exists()


def test_a_level_that_there_is_not(photos):
    for level in (-1, 4):
        with pytest.raises(RecipeError, match=rf"{level}\b.*\b3\b"):
            source_of(photos, level=level)


def test_sets_without_images_and_images_that_cannot_be_read_end_it(inline, tmp_path, photos, packed):
    texts = write_files(tmp_path / "texts", "a.txt")
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "gone.jpg").symlink_to("nowhere.jpg")
    cut = source_of(packed, preset="photo", level=0)
    packed.write_bytes(packed.read_bytes()[:-50_000])  # once it is open, or it would not be opened
    for sources, named in (
        ([source_of(photos, "a", level=0), source_of(texts)], r"texts\b.*\b1 file"),
        ([source_of(folder)], r"'gone\.jpg'.*No such file"),
        ([source_of(folder, preset="photo")], r"'gone\.jpg'.*No such file"),
        ([cut], r"photos\.tar\.gz"),
    ):
        with pytest.raises(DataError, match=named):
            build_index(sources, tmp_path / "index", workers=1)
    assert names_in(tmp_path) == ["photos", "photos.tar.gz", "texts"]


@pytest.mark.parametrize("piece", [256, 1])  # too large for the disk are the pieces; or what is made of them
def test_a_disk_that_refuses(inline, monkeypatch, tmp_path, photos, piece):
    monkeypatch.setattr(building, "_PIECE", piece)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(DataError, match="File too large"):
            build_index([source_of(photos, preset="exact")], tmp_path / "index", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == []


def test_of_two_builds_of_one_index_the_second_is_refused_at_once(tmp_path, photos):
    with durable_folder(tmp_path / "index"), pytest.raises(RecipeError):
        build_index([source_of(photos)], tmp_path / "index", workers=1, told=lambda _: pytest.fail("it works in vain"))
    assert names_in(tmp_path / "index") == []


def test_a_killed_build_leaves_nothing_under_the_name(tmp_path, photos):
    out = tmp_path / "index"
    program = f"""
import os, signal, sys
from data_tools.dedup import building
from data_tools.sources import SourceOptions, open_source
source = open_source({str(photos)!r}, None, SourceOptions(unlabelled=True))
def hook(event, arguments):
    if event == "shutil.rmtree" and str(arguments[0]).endswith("/pieces"):  # all is written, and nothing has its name
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
building.build_index([building.TestSource("photos", "src", source, "photo", 0)], {str(out)!r}, workers=1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".index.*.part/index/pieces/*.npz"))
    assert not out.exists()
    with pytest.raises(DataError, match=str(out)):
        FingerprintIndex(out)


@pytest.fixture
def index_copy(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit(index: Path, key: str, value: object) -> None:
    """Set what is at a path of keys in `index.json`, such as `files owners.npy bytes`."""
    described = content = json.loads((index / "index.json").read_text())
    content["test_sets"] *= 2 if key.startswith("test_sets 1") else 1
    *folders, last = [int(part) if part.isdigit() else part for part in key.split()]
    for part in folders:
        content = content[part]
    if value is GONE:
        del content[last]
    else:
        content[last] = value
    (index / "index.json").write_text(json.dumps(described))


def test_a_folder_without_index(tmp_path, made):
    for where in (tmp_path, tmp_path / "nowhere", made / "index.json"):
        with pytest.raises(DataError, match=str(where)):
            FingerprintIndex(where)


def test_every_file_is_missed(index_copy):
    for name in ("images.parquet", "hashes.npy", "owners.npy", "variants.npy", "thumbnails.npy"):
        path = index_copy / name
        content = path.read_bytes()
        flipped, rubbish = bytearray(content), (b"{['" * len(content))[: len(content)]
        flipped[-100] ^= 1
        for damaged in (None, content[:-1], bytes(flipped), rubbish):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(DataError, match=name):
                FingerprintIndex(index_copy).verify()
        path.write_bytes(content)
        FingerprintIndex(index_copy).verify()


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b'{"version": "1"}'])
def test_an_index_file_that_is_none(index_copy, text):
    (index_copy / "index.json").write_bytes(text)
    with pytest.raises(DataError, match=r"index\.json"):
        FingerprintIndex(index_copy)


GONE = "gone"
# A key of `index.json`, what it is set to, and what the message has to name.
EDITS = [
    ("version", 2, ["version 2", "1"]),
    ("algorithm", "pdq-64-0", ["pdq-64-0"]),
    ("algorithm", GONE, ["None"]),
    ("test_sets", [], ["test_sets"]),
    ("test_sets 1 name", "photos", ["photos"]),
    ("test_sets 0 level", 9, ["test_sets.0.level"]),
    ("test_sets 0 images", -1, ["test_sets.0.images"]),
    ("test_sets 0 images", 10**30, ["images.parquet"]),
    ("test_sets 0 hashes", 10**30, ["hashes.npy"]),
    ("test_sets 0 images", "11", ["test_sets.0.images"]),
    ("test_sets 0 colour", 1, ["colour"]),
    ("test_sets 0 settings distance", 81, ["distance 81", "80"]),
    ("test_sets 0 settings candidates", 256, ["candidates 256", "90"]),
    ("test_sets 0 settings correlation", float("nan"), ["correlation"]),
    ("test_sets 0 images", 12, ["images.parquet", "11", "12"]),
    ("test_sets 0 hashes", 87, ["hashes.npy", "(4, 88)", "(4, 87)"]),
    ("embedding", {"title": "m", "sha256": "5" * 64, "dimensions": 8}, ["embeddings.npy"]),
    ("files owners.npy", GONE, ["owners.npy"]),
    ("files ../secret", {"bytes": 1, "sha256": "5" * 64}, ["../secret"]),
    ("files owners.npy sha256", "no", ["files.owners.npy.sha256"]),
]


@pytest.mark.parametrize(("key", "value", "named"), EDITS)
def test_an_edited_index_file(index_copy, key, value, named):
    edit(index_copy, key, value)
    with pytest.raises(DataError) as caught:
        FingerprintIndex(index_copy)
    message = str(caught.value)
    assert all(name in message for name in named), message
    if not OF_PYDANTIC.search(message):
        assert_messages("dedup", {f"index.json, {key}: {value}": message}, {index_copy: "INDEX"})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("hashes", np.zeros((88, 4), np.uint64)),
        ("hashes", np.zeros((4, 88), np.int64)),
        ("hashes", np.asfortranarray(np.zeros((4, 88), np.uint64))),
        ("owners", np.zeros(87, np.uint32)),
        ("owners", np.full(88, 11, np.uint32)),
        ("variants", np.zeros(88, np.uint16)),
        ("variants", np.zeros((), np.uint8)),
        ("thumbnails", np.zeros((11, 32, 32), np.uint8)),
        ("thumbnails", np.zeros((10, 64, 64), np.uint8)),
        ("variants", np.array([print] * 88, object)),  # a pickle, which is not loaded
    ],
)
def test_arrays_that_contradict_each_other(index_copy, name, array):
    np.save(index_copy / f"{name}.npy", array)
    edit(index_copy, f"files {name}.npy bytes", (index_copy / f"{name}.npy").stat().st_size)
    with pytest.raises(DataError, match=f"{name}.npy"):
        FingerprintIndex(index_copy)


def test_an_index_is_told_by_its_content(inline, tmp_path, index_copy, photos, made):
    other = index_of(tmp_path / "other", [source_of(photos, level=0)])
    assert FingerprintIndex(index_copy).sha256 == FingerprintIndex(made).sha256 != other.sha256
