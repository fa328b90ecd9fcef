"""Damaged files of FFCV's own writer: refused by `vitscale shards adopt`, and found later by the checksums it took."""

import hashlib

import numpy as np
import pytest
from adopted_files import DAMAGES, first_jpeg, first_row, pixels_of
from messages import refusal
from shards_command import run
from small_files import edit_manifest, flip
from stock_beton import write_stock

from vitscale.data.shards import Manifest
from vitscale.data.shards.adopt import adopt
from vitscale.data.shards.opening import open_shard_file
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, VitscaleError


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
    for position, uids in ((first_jpeg(whole) + 30, [1]), (len(whole) - 24 * 9 - 1, []), (first_row(whole) + 16, [])):
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
