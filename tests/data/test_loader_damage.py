"""Damage of every kind is a DataError that says where."""

import io
import json
import shutil

import numpy as np
import pytest
from damage import flip_byte
from loaders import SHARDS, loader_of, read
from picture_shards import picture, view, write_pictures
from pictures import make_picture
from python_processes import wait_until
from small_files import edit_manifest, flip
from stored_dataset import write_one_shard

from vitscale.data.augmentation import EvalTransform
from vitscale.data.order import EvalOrder
from vitscale.data.shards import Manifest, ShardFile, StoredSample
from vitscale.ground.errors import DataError
from vitscale.ground.files.digests import file_digests


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("damage") / "data", SHARDS)


@pytest.fixture
def manifest(original, tmp_path):
    """A copy that a test may damage."""
    return Manifest.load(shutil.copytree(original.directory, tmp_path / "data"))


def evaluate(manifest, **options):
    order = EvalOrder([shard.num_selected for shard in manifest.shards], 16)
    return read(manifest, order, transform=EvalTransform("square", 1.0), **options)


# ------------------------------------------------------------------------------------------------------- single samples


def test_the_first_of_several_is_named(manifest):
    """Whichever thread comes first."""
    flip_byte(manifest, 0, [3, 4, 10, 14])
    for threads in (1, 2, 3, 4):
        with pytest.raises(DataError, match="slot 3, uid 9:"):
            evaluate(manifest, threads=threads, verify_shards=False)


def test_every_flipped_byte_is_found_and_named_by_file_slot_and_uid(manifest):
    path = manifest.shard_path(3)
    with ShardFile(path) as shard:
        offset, size, uid = int(shard.offset[2]), int(shard.size[2]), int(shard.uid[2])
    rng = np.random.default_rng(0)
    order = EvalOrder([0, 0, 0, 7], 7)
    for at in (0, size - 1, *rng.integers(0, size, 20).tolist()):
        flip(path, offset + at, bit := int(rng.integers(8)))
        for verify, named in ((False, f"slot 2, uid {uid}: .*checksum"), (True, "damaged")):
            with pytest.raises(DataError, match=f"{path}: {named}"):
                read(manifest, order, verify_shards=verify)
        flip(path, offset + at, bit)


@pytest.mark.parametrize("kind", ["cut", "CMYK"])
def test_pictures_that_nobody_should_store(tmp_path, kind):
    """One whose end is missing, and one for print."""
    content, height, width = picture(0)
    if kind == "cut":
        content = content[:-40]
    else:
        out = io.BytesIO()
        make_picture(0, height, width).convert("CMYK").save(out, "JPEG")
        content = out.getvalue()
    manifest = write_one_shard(tmp_path, [StoredSample(content, height, width, 0, 7)], first_uid=7)
    with pytest.raises(DataError, match=r"shard-00000\.beton: slot 0, uid 7:"):
        evaluate(manifest)


# -------------------------------------------------------------------------------------------------------- whole shards


def test_a_shard_is_compared_again_when_it_has_changed(manifest):
    assert len(evaluate(manifest)) == 8
    flip_byte(manifest, 2, [7])
    with pytest.raises(DataError, match="xxh3_128"):
        evaluate(manifest)


def test_shards_that_will_be_needed_are_compared_ahead(original, tmp_path, monkeypatch):
    """While others are read: the reading does not wait for it then."""
    seen = []
    from vitscale.data import open_shards

    inner = open_shards.verify_once
    monkeypatch.setattr(open_shards, "verify_once", lambda path, *rest: (seen.append(path.name), inner(path, *rest))[1])
    with loader_of(original, EvalOrder(SHARDS, 4), prefetch=1, cache=tmp_path) as loader:
        next(loader)
        assert wait_until(lambda: len(set(seen)) == 4)  # all are within the next batches
    assert seen[0] == "shard-00000.beton"


def test_a_file_removed_while_it_is_read_stays_readable(manifest):
    with loader_of(manifest) as loader:
        for _ in range(10):
            next(loader)
        shutil.rmtree(manifest.directory)
        steps = [next(loader).position for _ in range(20)]
    assert steps == list(range(10, 30))


@pytest.mark.parametrize("verify", [True, False])
def test_swapped_shards(manifest, verify):
    """Of one number of samples, sound in themselves, and not what the manifest lists there."""
    entries = [json.loads(entry.model_dump_json()) for entry in manifest.shards]
    entries[0]["path"], entries[2]["path"] = entries[2]["path"], entries[0]["path"]
    for index in (0, 2):
        digests = file_digests(manifest.directory / entries[index]["path"])
        entries[index]["bytes"] = digests.bytes
        if not verify:
            continue
        entries[index] |= digests._asdict()  # even then
    edit_manifest(manifest.directory, lambda data: data.update(shards=entries))
    with pytest.raises(DataError, match=r"shard-00002.*\b219\b.*\b0\b"):
        evaluate(Manifest.load(manifest.directory), verify_shards=verify)


def test_files_that_were_swapped(manifest):
    """Each under the other's name."""
    first, second, aside = manifest.shard_path(0), manifest.shard_path(2), manifest.directory / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with pytest.raises(DataError, match=r"shard-0000[02]\.beton"):
        evaluate(manifest)


@pytest.mark.parametrize("verify", [True, False])
def test_another_number_of_samples_than_the_manifest_says(manifest, verify):
    entry = manifest.shards[0].model_copy(update={"samples": 39})
    changed = manifest.model_copy(update={"num_samples": 119, "shards": (entry, *manifest.shards[1:])})
    with pytest.raises(DataError, match=r"\b40\b.*\b39\b"):
        evaluate(changed.save(manifest.directory), verify_shards=verify)


def test_a_damaged_list_of_excluded_slots(manifest, tmp_path):
    subset = view(manifest, tmp_path / "view", first=5, excluded=[1, 2])
    (tmp_path / "view" / "excluded.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"excluded\.npy"):
        evaluate(subset)


def test_batches_before_the_damage_are_delivered(manifest):
    manifest.shard_path(3).unlink()
    with loader_of(manifest, EvalOrder(SHARDS, 8)) as loader, pytest.raises(DataError):
        for found, batch in enumerate(loader):
            assert batch.position == found
    assert found == 113 // 8 - 1
