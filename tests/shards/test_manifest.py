import hashlib
import json
import os
import re

import numpy as np
import pytest
from messages import OF_PYDANTIC, assert_messages
from small_files import edit_manifest, excluding, flip, upload

from vitscale.data.shards import ExcludedSlots, Manifest, SelectExclude, SelectFirst, ShardEntry
from vitscale.data.shards.manifest import Adopted, StoredChecksums, schema_version_of
from vitscale.ground.errors import DataError


def entry(path="shard-00000.beton", samples=10, **more):
    return ShardEntry(
        path=path, samples=samples, bytes=100, sha256="a" * 64, xxh3_128="b" * 32, first_uid=0, **more
    )  # fmt: skip


def manifest(*shards):
    return Manifest(
        schema_version=schema_version_of(shards),
        fields=("image", "label", "uid", "crc"),
        num_samples=sum(shard.num_selected for shard in shards),
        class_names=("cat", "häschen"),
        shuffle_seed=3,
        options={"shard_samples": 10},
        shards=shards,
    )


def test_saves_and_loads(tmp_path):
    saved = manifest(entry(), entry("../elsewhere/shard-00001.beton", select=SelectFirst(first=4))).save(tmp_path)
    for place in (tmp_path, str(tmp_path), tmp_path / "manifest.json"):
        loaded = Manifest.load(place)
        assert loaded == saved
        lines = (tmp_path / "manifest.json").read_bytes().splitlines(keepends=True)
        assert loaded.sha256 == hashlib.sha256(b"".join([lines[0], *lines[2:]])).hexdigest()
        assert json.loads(b"".join(lines))["checksum"] == loaded.sha256 and loaded.sha256.encode() in lines[1]
    assert loaded.num_samples == 14
    assert loaded.directory == tmp_path
    assert loaded.shard_path(1) == tmp_path / "../elsewhere/shard-00001.beton"
    assert loaded.selected_slots(0) is None
    assert loaded.selected_slots(1).tolist() == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    again = tmp_path / "again"
    again.mkdir()
    assert loaded.save(again).sha256 == saved.sha256 == manifest(*saved.shards).sha256


def without(folder, slots, dtype=np.uint32):
    return manifest(entry(select=excluding(folder, "out.npy", slots, dtype))).save(folder)


def test_excluded_slots_damaged_or_missing(tmp_path):
    loaded = without(tmp_path, [0, 3, 9])
    assert loaded.num_samples == 7
    assert loaded.selected_slots(0).tolist() == [1, 2, 4, 5, 6, 7, 8]
    flip(tmp_path / "out.npy", 130)
    with pytest.raises(DataError, match="sha256"):
        loaded.selected_slots(0)
    (tmp_path / "out.npy").unlink()
    with pytest.raises(DataError, match=r"out\.npy"):
        loaded.selected_slots(0)


def test_impossible_excluded_slots(tmp_path):
    one = excluding(tmp_path, "out.npy", [1])
    said_to_be_two = manifest(entry(select=SelectExclude(exclude=one.exclude.model_copy(update={"count": 2}))))
    with pytest.raises(DataError, match=r"out\.npy.*uint32.*\b10\b"):
        said_to_be_two.save(tmp_path).selected_slots(0)
    for slots, dtype in (([3, 0], np.uint32), ([3, 3], np.uint32), ([10], np.uint32), ([1, 2], np.int64)):
        with pytest.raises(DataError, match=r"out\.npy.*uint32.*\b10\b"):
            without(tmp_path, slots, dtype).selected_slots(0)


def change(**values):
    return lambda data: data.update(values)


def change_shard(**values):
    return lambda data: data["shards"][0].update(values)


# A change of `manifest.json`, and what its message has to name beside the file.
MISTAKES = {
    "another version": (change(schema_version=3), ["schema_version 3", "1", "2"]),
    "no version": (lambda data: data.pop("schema_version"), ["schema_version"]),
    "unknown key": (change(colour="red"), ["colour"]),
    "unknown key of a shard": (change_shard(colour="red"), ["shards.0.colour"]),
    "another number of samples": (change(num_samples=7), ["num_samples", "7"]),
    "a number in quotes": (change(num_samples="20"), ["num_samples"]),
    "no class names": (lambda data: data.pop("class_names"), ["class_names"]),
    "a class twice": (change(class_names=["cat", "cat"]), ["cat"]),
    "a shard twice": (change_shard(path="shard-00001.beton"), ["shard-00001.beton"]),
    "an absolute path": (change_shard(path="/etc/passwd"), ["/etc/passwd"]),
    "no sha256": (change_shard(sha256="zz"), ["sha256"]),
    "more samples selected than there are": (change_shard(select={"first": 11}), ["10"]),
    "unknown selection": (change_shard(select={"last": 1}), ["select"]),
    "an empty shard": (change_shard(samples=0), ["samples"]),
}


def test_every_bit_that_turns_is_noticed_or_changes_nothing(tmp_path):
    excluded = ExcludedSlots(path="out.npy", sha256="c" * 64, count=2)
    adopted = Adopted(image_field="x", label_field=None, checksums=StoredChecksums(path="y.npy", sha256="d" * 64))
    shards = (
        entry(select=SelectExclude(exclude=excluded)),
        entry("b.beton", select=SelectFirst(first=4), adopted=adopted),
    )
    whole = manifest(*shards).save(tmp_path)
    content, unnoticed = whole.path.read_bytes(), []
    with whole.path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(content)):
            byte = content[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            try:
                if Manifest.load(whole.path) != whole:
                    unnoticed.append(bit)
            except DataError:
                pass
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert not unnoticed and Manifest.load(whole.path) == whole


def test_an_edited_manifest_is_refused_until_its_checksum_is_removed(tmp_path):
    saved = manifest(entry()).save(tmp_path)
    text = saved.path.read_text()
    for edited in (text.replace("cat", "dog"), json.dumps(json.loads(text)), text.replace("\n", "\r\n")):
        saved.path.write_text(edited)
        with pytest.raises(DataError, match="checksum"):
            Manifest.load(tmp_path)
    without = re.sub(r'  "checksum": "\w+",\n', "", text)
    saved.path.write_text(without)  # as earlier versions wrote it, with the same identity
    assert Manifest.load(tmp_path) == saved and Manifest.load(tmp_path).sha256 == saved.sha256
    saved.path.write_text(without.replace("cat", "dog"))
    assert Manifest.load(tmp_path).class_names == ("dog", "häschen")
    assert Manifest.load(tmp_path).save(tmp_path).sha256 != saved.sha256


@pytest.mark.parametrize("mistake", MISTAKES)
def test_malformed_manifests_are_explained(tmp_path, mistake):
    manifest(entry(), entry("shard-00001.beton")).save(tmp_path)
    edit_manifest(tmp_path, MISTAKES[mistake][0])
    with pytest.raises(DataError) as raised:
        Manifest.load(tmp_path)
    message = str(raised.value)
    assert all(name in message for name in ["manifest.json", *MISTAKES[mistake][1]]), message
    assert "\n" not in message
    if not OF_PYDANTIC.search(message):
        assert_messages("shards", {mistake: message}, {tmp_path: "DATASET"})


@pytest.mark.parametrize("content", [None, "", "{", "[]", '"x"', "\x00\x01"])
def test_no_manifest_at_all(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=rf"{tmp_path}.*manifest\.json"):
        Manifest.load(tmp_path)


def test_at_a_url(tmp_path):
    manifest(entry("../elsewhere/shard-00001.beton")).save(tmp_path)
    url = upload(tmp_path / "manifest.json", "memory://bucket/a/train/manifest.json")
    for place in ("memory://bucket/a/train", "memory://bucket/a/train/", url):
        loaded = Manifest.load(place)
        assert loaded.where == url and loaded.sha256 == Manifest.load(tmp_path).sha256
        assert loaded.location("../elsewhere/x.beton") == "memory://bucket/a/elsewhere/x.beton"
    with pytest.raises(DataError, match=r"memory://bucket"):
        loaded.location("../../../other/x.beton")
    with pytest.raises(ValueError, match="memory://bucket"):
        _ = loaded.path
    for absent in ("memory://bucket/absent", tmp_path / "absent"):
        with pytest.raises(DataError, match=str(absent)):
            Manifest.load(absent)
