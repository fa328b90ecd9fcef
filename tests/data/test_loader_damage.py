"""Damage of every kind is a DataError that says where."""

import io
import json
import os
import shutil

import numpy as np
import pytest
from damage import KINDS, flip_byte, store_zeros
from leaks import wait_until
from picture_shards import picture, view, write_pictures
from pictures import make_picture

from vitscale.data.augmentation import EvalTransform, TrainTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest, ShardEntry, ShardFile, StoredSample, field_names, write_shard
from vitscale.ground.errors import DataError
from vitscale.ground.files.digests import file_digests

SHARDS = [40, 33, 40, 7]
BY_SAMPLE = Reading(verify_shards=False)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("damage") / "data", SHARDS)


@pytest.fixture
def manifest(original, tmp_path):
    """A copy that a test may damage."""
    return Manifest.load(shutil.copytree(original.directory, tmp_path / "data"))


def evaluate(manifest, **reading):
    order = EvalOrder([shard.num_selected for shard in manifest.shards], 16)
    options = {"image_size": 8, "transform": EvalTransform("square", 1.0), "reading": Reading(**reading)}
    with Loader(manifest, order, **options) as loader:
        return list(loader)


def endless(manifest, **reading):
    order = TrainOrder([shard.num_selected for shard in manifest.shards], 16, 0)
    return Loader(manifest, order, image_size=8, transform=TrainTransform(), reading=Reading(**reading))


# ------------------------------------------------------------------------------------------------------- single samples


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_flipped_byte_is_named_by_file_slot_and_uid(manifest, where, threads):
    slot, path = 21, manifest.shard_path(1)
    with ShardFile(path) as shard:
        offset, size, uid = int(shard.offset[slot]), int(shard.size[slot]), int(shard.uid[slot])
    content = bytearray(path.read_bytes())
    content[offset + {"first": 0, "middle": size // 2, "last": size - 1}[where]] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        evaluate(manifest, threads=threads, verify_shards=False)
    message = str(error.value)
    assert str(path) in message and f"slot {slot}" in message and f"uid {uid}" in message and "checksum" in message


def test_the_first_of_several_is_named(manifest):
    """Whichever thread comes first."""
    flip_byte(manifest, 0, [3, 4, 10, 14])
    for threads in (1, 2, 3, 4):
        with pytest.raises(DataError, match="slot 3, uid 9:"):
            evaluate(manifest, threads=threads, verify_shards=False)


def test_every_flipped_byte_is_found(manifest):
    path = manifest.shard_path(3)
    with ShardFile(path) as shard:
        offset, size = int(shard.offset[2]), int(shard.size[2])
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    order = EvalOrder([0, 0, 0, 7], 7)
    for at in rng.integers(0, size, 60):
        content = bytearray(sound)
        content[offset + at] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        for reading, named in ((BY_SAMPLE, "slot 2, uid"), (Reading(), r"shard-00003\.beton: damaged")):
            with (
                pytest.raises(DataError, match=named),
                Loader(manifest, order, image_size=8, transform=EvalTransform(), reading=reading) as loader,
            ):
                next(loader)


def test_a_picture_that_the_decoder_refuses(manifest):
    """Bytes that match their checksum and are no JPEG: a fault of whoever wrote the shard."""
    changed = store_zeros(manifest, 3, [4])
    for verify in (True, False):
        with pytest.raises(DataError, match=rf"slot 4, uid {3 * (113 + 4)}:"):
            evaluate(changed, verify_shards=verify)


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
    folder = tmp_path / "data"
    folder.mkdir()
    write_shard(folder / "shard-00000.beton", [StoredSample(content, height, width, 0, 7)])
    manifest = Manifest(
        fields=field_names(with_labels=False),
        num_samples=1,
        class_names=("a",),
        shuffle_seed=0,
        shards=(ShardEntry.of_file(folder / "shard-00000.beton", samples=1, first_uid=7),),
    ).save(folder)
    with pytest.raises(DataError, match=r"shard-00000\.beton: slot 0, uid 7:"):
        evaluate(manifest)


# -------------------------------------------------------------------------------------------------------- whole shards


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
def test_a_file_of_another_size_than_the_manifest_says(manifest, change, verify):
    path = manifest.shard_path(2)
    content = path.read_bytes()
    path.write_bytes({"shorter": content[:-1], "longer": content + b"\0", "empty": b""}[change])
    with pytest.raises(DataError, match=f"{path}.*{manifest.shards[2].bytes:,} bytes"):
        evaluate(manifest, verify_shards=verify)


@pytest.mark.parametrize("verify, problem", [(True, "missing, but the manifest lists it"), (False, "cannot be opened")])
def test_a_vanished_file(manifest, verify, problem):
    manifest.shard_path(2).unlink()
    with pytest.raises(DataError, match=f"{manifest.shard_path(2)}: {problem}"):
        evaluate(manifest, verify_shards=verify)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_not_the_one_of_the_manifest(manifest, kind):
    """Compared as a whole before any of it is used, also what no checksum of a sample covers; and found each time."""
    KINDS[kind](manifest, 2, [7])
    manifest.save(manifest.directory)  # as it was
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{manifest.shard_path(2)}: .*xxh3_128"):
            evaluate(manifest)


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
    reading = Reading(prefetch=1, cache=tmp_path)
    order = EvalOrder(SHARDS, 4)
    with Loader(original, order, image_size=8, transform=EvalTransform(), reading=reading) as loader:
        next(loader)
        assert wait_until(lambda: len(set(seen)) == 4)  # all are within the next batches
    assert seen[0] == "shard-00000.beton"


def test_a_file_truncated_while_it_is_read(manifest):
    """An error, not a SIGBUS."""
    loader = endless(manifest, prefetch=1)
    next(loader)
    for index in range(4):
        os.truncate(manifest.shard_path(index), 5000)
    with pytest.raises(DataError, match=r"shard-0000\d\.beton: slot \d+, uid \d+: .*\b0 of\b"):
        for _ in loader:
            pass
    assert list(loader) == []  # it has ended


def test_a_file_removed_while_it_is_read_stays_readable(manifest):
    with endless(manifest) as loader:
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
    data = json.loads(manifest.path.read_text()) | {"shards": entries}
    del data["checksum"]
    manifest.path.write_text(json.dumps(data))
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
    order = EvalOrder(SHARDS, 8)
    with Loader(manifest, order, image_size=8, transform=EvalTransform()) as loader, pytest.raises(DataError):
        for found, batch in enumerate(loader):
            assert batch.position == found
    assert found == 113 // 8 - 1
