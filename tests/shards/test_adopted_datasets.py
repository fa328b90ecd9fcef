"""Adopted files read by the other commands, by views, from a URL and by conversions."""

import io
import json
from collections import Counter

import numpy as np
import pytest
from adopted_files import pixels_of
from PIL import Image
from shards_command import run
from small_files import upload

from data_tools.sources.dataset import open_dataset
from data_tools.sources.source import SourceOptions
from data_tools.views import write_subset
from vitscale.data.shards.opening import open_shard
from vitscale.data.shards.verify import verify


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


def test_at_a_url(small, adopted, tmp_path):
    upload(small, "memory://adopted/val.beton")
    assert run("verify", upload(tmp_path / "ds", "memory://adopted/ds"))[0] == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_as_the_source_of_a_conversion(small, adopted, tmp_path, is_remote):
    upload(small, "memory://adopted/val.beton")
    where = upload(tmp_path / "ds", "memory://adopted/ds") if is_remote else str(tmp_path / "ds")
    source = open_dataset("SRC", [where], SourceOptions())
    items = list(source.items(0, Counter()))
    assert [item.labels for item in items] == [(("cat", "dog", "owl", "yak")[i % 4],) for i in range(9)]
    for i, item in enumerate(items):
        image = Image.open(io.BytesIO(source.read(0, item.content)))
        assert image.format == ("JPEG" if i % 2 else "PNG") and image.size == (30 + i % 2 * 120, 20 + i)
        if not i % 2:
            assert np.array_equal(np.asarray(image), pixels_of(i, 20 + i, 30))
