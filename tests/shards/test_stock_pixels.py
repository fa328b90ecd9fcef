"""`vitscale shards verify --stock`: every image read by FFCV's own code, of our shards and of adopted files."""

import sys

import pytest
from pictures import encoded, make_picture
from shards_command import run
from stored_dataset import Photo, write_dataset

from vitscale.data.shards import ShardFile
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.beton import StoredSample, write_shard
from vitscale.data.shards.verify import StockReader
from vitscale.ground.errors import RecipeError

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
    with pytest.raises(RecipeError, match=r"vitscale\[ffcv\]"):
        run("verify", tmp_path / "ours", "--stock")
