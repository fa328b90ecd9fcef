"""Folders that are no index, or a damaged one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from dedup_data import index_of, source_of
from messages import OF_PYDANTIC, assert_messages

from data_tools.dedup.index import FingerprintIndex
from vitscale.ground.errors import DataError


@pytest.fixture
def index_copy(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def edit(index: Path, change) -> None:
    content = json.loads((index / "index.json").read_text())
    change(content)
    (index / "index.json").write_text(json.dumps(content))


def put_array(index: Path, name: str, array: np.ndarray) -> None:
    """In place of another one, with its size in `index.json`."""
    np.save(index / f"{name}.npy", array)
    size = (index / f"{name}.npy").stat().st_size
    edit(index, lambda content: content["files"][f"{name}.npy"].update(bytes=size))


def test_a_folder_without_index(tmp_path, made):
    for where in (tmp_path, tmp_path / "nowhere", made / "index.json"):
        with pytest.raises(DataError, match=str(where)):
            FingerprintIndex(where)


def test_every_file_is_missed(index_copy):
    for name in ("images.parquet", "hashes.npy", "owners.npy", "variants.npy", "thumbnails.npy"):
        path = index_copy / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(DataError, match=name):
            FingerprintIndex(index_copy)
        path.unlink()
        with pytest.raises(DataError, match=name):
            FingerprintIndex(index_copy)
        path.write_bytes(content)
        FingerprintIndex(index_copy).verify()


def test_a_changed_byte_is_found_when_everything_is_read(index_copy):
    path = index_copy / "thumbnails.npy"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"thumbnails\.npy"):
        FingerprintIndex(index_copy).verify()


@pytest.mark.parametrize("name", ["hashes.npy", "images.parquet"])
def test_files_of_something_else(index_copy, name):
    path = index_copy / name
    path.write_bytes(b"{['" * (path.stat().st_size // 3) + b"x" * (path.stat().st_size % 3))
    with pytest.raises(DataError, match=name):
        FingerprintIndex(index_copy)


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
    ("test_sets", GONE, ["test_sets"]),
    ("test_sets", [], ["test_sets"]),
    ("test_sets", {"a": 1}, ["test_sets"]),
    ("test_sets 1", 5, ["test_sets.1"]),
    ("test_sets 1 name", "photos", ["photos"]),
    ("test_sets 0 level", GONE, ["test_sets.0.level"]),
    ("test_sets 0 level", 9, ["test_sets.0.level"]),
    ("test_sets 0 name", None, ["test_sets.0.name"]),
    ("test_sets 0 images", -1, ["test_sets.0.images"]),
    ("test_sets 0 images", 10**30, ["images.parquet"]),
    ("test_sets 0 hashes", 10**30, ["hashes.npy"]),
    ("test_sets 0 images", "11", ["test_sets.0.images"]),
    ("test_sets 0 colour", 1, ["colour"]),
    ("test_sets 0 settings", None, ["test_sets.0.settings"]),
    ("test_sets 0 settings distance", 81, ["distance 81", "80"]),
    ("test_sets 0 settings candidates", 256, ["candidates 256", "90"]),
    ("test_sets 0 settings correlation", float("nan"), ["correlation"]),
    ("test_sets 0 settings min_quality", "50", ["min_quality"]),
    ("test_sets 0 settings near", 1, ["near"]),
    ("test_sets 0 images", 12, ["images.parquet", "11", "12"]),
    ("test_sets 0 hashes", 87, ["hashes.npy", "(4, 88)", "(4, 87)"]),
    ("embedding", {"title": "m", "sha256": "5" * 64}, ["embedding.dimensions"]),
    ("embedding", {"title": "m", "sha256": "5" * 64, "dimensions": 8}, ["embeddings.npy"]),
    ("files", [], ["files"]),
    ("files owners.npy", GONE, ["owners.npy"]),
    ("files ../secret", {"bytes": 1, "sha256": "5" * 64}, ["../secret"]),
    ("files owners.npy bytes", 1.5, ["files.owners.npy.bytes"]),
    ("files owners.npy sha256", "no", ["files.owners.npy.sha256"]),
]


def refused(index: Path, key: str, value: object) -> str:
    def change(content) -> None:
        content["test_sets"] *= 2 if key.startswith("test_sets 1") else 1
        *folders, last = [int(part) if part.isdigit() else part for part in key.split()]
        for part in folders:
            content = content[part]
        if value is GONE:
            del content[last]
        else:
            content[last] = value

    edit(index, change)
    with pytest.raises(DataError) as caught:
        FingerprintIndex(index)
    return str(caught.value)


@pytest.mark.parametrize(("key", "value", "named"), EDITS)
def test_an_edited_index_file(index_copy, key, value, named):
    message = refused(index_copy, key, value)
    assert all(name in message for name in named), message


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
    ],
)
def test_arrays_that_contradict_each_other(index_copy, name, array):
    put_array(index_copy, name, array)
    with pytest.raises(DataError, match=f"{name}.npy"):
        FingerprintIndex(index_copy)


def test_pickles_are_not_loaded(index_copy):
    (index_copy / "variants.npy").unlink()
    with (index_copy / "variants.npy").open("wb") as file:
        np.lib.format.write_array(file, np.array([print] * 88, object), allow_pickle=True)
    size = (index_copy / "variants.npy").stat().st_size
    edit(index_copy, lambda content: content["files"]["variants.npy"].update(bytes=size))
    with pytest.raises(DataError, match=r"variants\.npy"):
        FingerprintIndex(index_copy)


def test_an_index_is_told_by_its_content(inline, tmp_path, index_copy, photos, made):
    other = index_of(tmp_path / "other", [source_of(photos, level=0)])
    assert FingerprintIndex(index_copy).sha256 == FingerprintIndex(made).sha256 != other.sha256


def test_messages(index_copy):
    whole, said = (index_copy / "index.json").read_text(), {}
    for key, value, _ in EDITS:
        said[f"index.json, {key}: {value}"] = refused(index_copy, key, value)
        (index_copy / "index.json").write_text(whole)
    own = {cause: message for cause, message in said.items() if not OF_PYDANTIC.search(message)}
    assert_messages("dedup", own, {index_copy: "INDEX"})
