"""Adopted files of FFCV's own writer: damage, views, URLs, conversions, other commands, and FFCV as a second reader."""

import hashlib
import io
import json
import sys
from collections import Counter

import numpy as np
import pytest
from adopted_files import DAMAGES, FIRST_ROW, first_jpeg, pixels_of
from messages import refusal
from pictures import encoded, make_picture
from PIL import Image
from shards_command import run
from small_files import edit_manifest, flip, upload
from stock_beton import write_stock
from stored_dataset import Photo, write_dataset

from data_tools.sources.dataset import open_dataset
from data_tools.sources.source import SourceOptions
from data_tools.views import write_subset
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.beton import StoredSample, write_shard
from vitscale.data.shards.opening import open_shard, open_shard_file
from vitscale.data.shards.verify import StockReader, verify
from vitscale.ground.errors import DataError, RecipeError, VitscaleError


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_written(small, tmp_path, damage):
    content = bytearray(small.read_bytes())
    DAMAGES[damage](content)
    small.write_bytes(content)
    with refusal(VitscaleError, "adopt", damage, {small: "FILE"}):
        adopt(str(small), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["val.beton"]


def test_what_only_decoding_shows(small, tmp_path):
    content = bytearray(small.read_bytes())
    end = content.index(b"\xff\xd9", first_jpeg(content))
    content[end - 400 : end] = bytes(400)  # the rest of the picture
    small.write_bytes(content)
    adopt(str(small), str(tmp_path / "unseen"))
    with pytest.raises(DataError, match=r"\b1 of 9\b.*\bsample 1\b"):
        adopt(str(small), str(tmp_path / "out"), decode=True)


def test_a_file_that_changes_meanwhile(small, tmp_path):
    def write_on(_):
        with small.open("ab") as file:
            file.write(bytes(24))

    with pytest.raises(DataError, match=r"val\.beton"):
        adopt(str(small), str(tmp_path / "out"), progress=write_on)
    assert not (tmp_path / "out").exists()


def test_damage_after_adoption_is_found(small, adopted, tmp_path):
    code, text = run("verify", tmp_path / "ds", "--decode")
    assert code == 0 and "whole: 1 shard, 9 samples, all decoded" in text
    whole = small.read_bytes()
    for position, uids in ((first_jpeg(whole) + 30, [1]), (len(whole) - 24 * 9 - 1, []), (FIRST_ROW + 16, [])):
        small.write_bytes(whole)
        flip(small, position)
        damage = verify(adopted).damage
        assert damage and [one.uid for one in damage if one.uid is not None] == uids
    with small.open("r+b") as file:
        file.truncate(len(whole) - 24)
    with pytest.raises(DataError, match=r"val\.beton.*bytes"):
        open_shard_file(adopted, 0, small)
    small.unlink()
    assert [one.what for one in verify(adopted).damage] == ["missing"]


def test_another_file_in_its_place(small, adopted):
    from ffcv.fields import IntField, RGBImageField

    rows = [(pixels_of(i, 30, 30), 0) for i in range(8)]
    fields = {"picture": RGBImageField(write_mode="raw"), "class": IntField()}
    write_stock(small, fields, rows)
    entry = adopted.shards[0].model_copy(update={"bytes": small.stat().st_size})
    with pytest.raises(DataError, match=r"\b8\b.*\b9\b"):
        open_shard_file(adopted.model_copy(update={"shards": (entry,)}), 0, small)


def test_damaged_checksums(small, adopted, tmp_path):
    checksums = tmp_path / "ds" / "val.crc.npy"
    flip(checksums, 130)
    with pytest.raises(DataError, match=r"val\.crc\.npy.*sha256"):
        open_shard_file(adopted, 0, small)
    assert any("val.crc.npy: damaged" in one.what for one in verify(adopted).damage)
    checksums.unlink()
    with pytest.raises(DataError, match=r"val\.crc\.npy"):
        open_shard_file(adopted, 0, small)
    np.save(checksums, np.zeros(8, np.uint32))
    digest = hashlib.sha256(checksums.read_bytes()).hexdigest()
    edit_manifest(tmp_path / "ds", lambda data: data["shards"][0]["adopted"]["checksums"].update(sha256=digest))
    with pytest.raises(DataError, match=r"val\.crc\.npy.*\b9 uint32"):
        open_shard_file(Manifest.load(tmp_path / "ds"), 0, small)


def test_info_and_head(adopted, tmp_path):
    code, text = run("info", tmp_path / "ds", "--classes", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["schema_version"] == 2 and facts["fields"] == ["picture", "class"]
    assert facts["class_counts"] == {"cat": 3, "dog": 2, "owl": 2, "yak": 2} and facts["unlabelled"] == 0
    code, text = run("head", tmp_path / "ds", "-n", 4, "--out", tmp_path / "sheet.png")
    assert code == 0 and "first 4 of 9" in text and "yak" in text
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"), int)
    for i in range(4):  # a raw one, a JPEG, ...: each tile has the mean colour of its picture
        picture = pixels_of(i, 20 + i, 30 + (i % 2) * 120)
        height, width = (round(160 * side / max(picture.shape)) for side in picture.shape[:2])
        y, x = 12 + i // 2 * 208 + (160 - height) // 2, 12 + i % 2 * 172 + (160 - width) // 2
        assert np.abs(sheet[y : y + height, x : x + width].mean((0, 1)) - picture.mean((0, 1))).max() < 4


def test_export(small, adopted, tmp_path):
    code, text = run("export", tmp_path / "ds", tmp_path / "files")
    assert code == 0 and "9 images, 4 classes" in text
    content = small.read_bytes()
    for i in range(9):
        path = tmp_path / "files" / ("cat", "dog", "owl", "yak")[i % 4] / f"{i:09d}{'.jpg' if i % 2 else '.png'}"
        if i % 2:
            assert path.read_bytes() in content
            assert Image.open(path).size == (150, 20 + i)
        else:
            assert np.array_equal(np.asarray(Image.open(path)), pixels_of(i, 20 + i, 30))


def test_views_find_file_and_checksums(adopted, tmp_path):
    write_subset(str(tmp_path / "ds"), str(tmp_path / "a" / "b"), 5)
    view = write_subset(str(tmp_path / "a" / "b"), str(tmp_path / "c"), 4)
    assert (view.schema_version, view.num_samples) == (2, 4)
    assert view.shards[0].path == "../val.beton"
    assert view.shards[0].adopted.checksums.path == "../ds/val.crc.npy"
    assert not verify(view, decode=True).damage
    with open_shard(view, 0) as shard:
        assert shard.slots.tolist() == [0, 1, 2, 3] and len(shard.image(3)) == shard.file.size[3]


@pytest.mark.parametrize("is_remote", [False, True])
def test_wherever_it_lies_it_is_verified_and_the_source_of_a_conversion(small, adopted, tmp_path, is_remote):
    upload(small, "memory://adopted/val.beton")
    where = upload(tmp_path / "ds", "memory://adopted/ds") if is_remote else str(tmp_path / "ds")
    assert run("verify", where)[0] == 0
    source = open_dataset("SRC", [where], SourceOptions())
    items = list(source.items(0, Counter()))
    assert [item.labels for item in items] == [(("cat", "dog", "owl", "yak")[i % 4],) for i in range(9)]
    for i, item in enumerate(items):
        image = Image.open(io.BytesIO(source.read(0, item.content)))
        assert image.format == ("JPEG" if i % 2 else "PNG") and image.size == (30 + i % 2 * 120, 20 + i)
        if not i % 2:
            assert np.array_equal(np.asarray(image), pixels_of(i, 20 + i, 30))


# numba complains when FFCV's compiled pipelines are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_ours_and_adopted_ones(tmp_path, small):
    write_dataset(tmp_path / "ours", [Photo(f"{index}.png", (index % 2,), seed=index) for index in range(7)], 3)
    adopt(str(small), str(tmp_path / "adopted"))
    for name in ("ours", "adopted"):
        code, text = run("verify", tmp_path / name, "--stock")
        assert code == 0 and f"all read by FFCV {StockReader().version}" in text


def test_other_pixels_are_told_by_slot(tmp_path):
    for name, changed in (("a", 5), ("b", 6)):
        pictures = [make_picture(index if index < 4 else 10 * changed + index, 20 + index, 31) for index in range(6)]
        write_shard(
            tmp_path / name, [StoredSample(encoded(each), 20 + at, 31, 0, at, None) for at, each in enumerate(pictures)]
        )
    with ShardFile(tmp_path / "a") as shard:
        assert StockReader().differing(tmp_path / "b", shard, "image").tolist() == [False] * 4 + [True] * 2
        assert not StockReader().differing(tmp_path / "a", shard, "image").any()


def test_without_ffcv_it_says_what_to_install(tmp_path, monkeypatch):
    write_dataset(tmp_path / "ours", [Photo("a.png")], 1)
    monkeypatch.setitem(sys.modules, "ffcv.libffcv", None)
    with pytest.raises(RecipeError, match=r"pip install '\.\[ffcv\]'"):
        run("verify", tmp_path / "ours", "--stock")
