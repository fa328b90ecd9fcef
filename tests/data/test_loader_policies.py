"""Damage: an error that says where, another sample in its place, or a place that does not count."""

import logging
import os
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from damage import KINDS, METADATA, SILENT, cut_before, flip_byte, misstate_checksums, store_zeros
from loaders import SEED, loader_of, read, same
from picture_shards import write_pictures
from processes import wait_until
from small_files import excluding, flip
from views import expected_view

from vitscale.data import open_shards
from vitscale.data.augmentation import EvalTransform, ResizeTransform, TrainTransform, sample_keys
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import Manifest, SelectFirst
from vitscale.ground.errors import DataError
from vitscale.recipe import Solarize

SHARDS, BATCH, SIDE = [20, 13, 20, 7], 12, 16
FIRST = [0, 20, 33, 53]  # sample of each shard's slot 0; its uid is three times that
INVERT = Solarize(kind="solarize", probability=1.0, threshold=0)
OPTIONS = {"batch": BATCH, "side": SIDE, "stop": 15, "operations": (INVERT,)}  # three epochs
FIELDS = ("images", "labels", "uids", "keys", "mask")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("policies") / "data", SHARDS)


@pytest.fixture
def manifest(original, tmp_path):
    """A copy that a test may damage."""
    return Manifest.load(shutil.copytree(original.directory, tmp_path / "data"))


def uid(index, slot):
    return 3 * (FIRST[index] + slot)


def train(manifest, policy, **options):
    return read(manifest, **{**OPTIONS, "bad_samples": policy, **options})


@pytest.fixture(scope="module")
def sound(original):
    return train(original, "error")


def rows_with(batches, uids):
    """(batch, row) of all places where these samples stand."""
    return [(i, row) for i, b in enumerate(batches) for row, one in enumerate(b.uids.tolist()) if one in uids]


@pytest.mark.parametrize("kind", KINDS)
def test_error(manifest, kind):
    changed = KINDS[kind](manifest, 2, [7])
    reading = {"check_rate": 0.0} if kind == "zeros" else {}  # the decoder looks at all, whatever share is checked
    with pytest.raises(DataError, match=rf"shard-00002\.beton: slot 7, uid {uid(2, 7)}: "):
        train(changed, "error", verify_shards=False, **reading)
    with pytest.raises(DataError, match=r"shard-00002\.beton: "):
        train(changed, "error")


@pytest.mark.parametrize("policy", ["substitute", "mask"])
@pytest.mark.parametrize("verify", [True, False])
def test_sound_samples_do_not_notice(original, sound, policy, verify, caplog):
    assert same(train(original, policy, verify_shards=verify), sound) and not caplog.records


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("policy", ["mask", "substitute"])
def test_damaged_samples(manifest, sound, policy, kind, verify):
    """Masked: in their places nothing that counts. Else: the next sound sample of the shard, as this epoch shows it;
    behind the last slot comes the first one. All else as it was."""
    changed = KINDS[kind](KINDS[kind](manifest, 2, [7, 8]), 3, [6])
    stands_in = {uid(2, 7): uid(2, 9), uid(2, 8): uid(2, 9), uid(3, 6): uid(3, 0)}
    places = rows_with(sound, stands_in)
    assert len(places) >= 7  # three times in three epochs, but for those left out
    batches = train(changed, policy, verify_shards=verify)
    for i, (before, after) in enumerate(zip(sound, batches, strict=True)):
        bad = torch.tensor([(i, row) in places for row in range(BATCH)])
        assert after.bad_samples == int(bad.sum())
        for name in FIELDS:
            assert torch.equal(getattr(after, name)[~bad], getattr(before, name)[~bad])
        assert torch.equal(after.mask, ~bad if policy == "mask" else before.mask)
        if policy == "mask":
            assert not after.images[bad].any()
            assert all(torch.equal(getattr(after, name), getattr(before, name)) for name in ("labels", "uids", "keys"))
            continue
        for row in torch.nonzero(bad)[:, 0].tolist():
            one = stands_in[before.uids[row].item()]
            assert after.uids[row] == one and after.labels[row] == one // 3 % 4 - 1
            assert after.keys[row].item() == sample_keys(SEED, after.epoch, np.array([one])).view(np.int64)[0]
            view_of_it = expected_view(one, TrainTransform(), after.epoch, SEED, SIDE)
            assert np.abs(255 - after.images[row].numpy() - view_of_it).max() <= 0.501


def test_a_substitute_belongs_to_the_dataset(manifest):
    """What was taken out of a dataset does not come back so."""
    flip_byte(flip_byte(manifest, 0, [4]), 1, [2])
    selects = SelectFirst(first=5), excluding(manifest.directory, "out.npy", [0, 3, 4, 5])
    shards = tuple(
        entry.model_copy(update={"select": select}) for entry, select in zip(manifest.shards, selects, strict=False)
    )
    subset = manifest.model_copy(update={"num_samples": 5 + 9, "shards": shards}).save(manifest.directory)
    batches = train(subset, "substitute", verify_shards=False)
    seen = {one for batch in batches for one in batch.uids.tolist()}
    assert seen == {uid(0, slot) for slot in range(4)} | {uid(1, slot) for slot in (1, 6, 7, 8, 9, 10, 11, 12)}
    assert sum(batch.bad_samples for batch in batches) > 5


def test_no_substitute_is_left(manifest):
    flip_byte(manifest, 3, list(range(7)))
    with pytest.raises(DataError, match=r"shard-00003\.beton: slot \d, uid \d+: "):
        train(manifest, "substitute", verify_shards=False)
    assert sum(batch.bad_samples for batch in train(manifest, "mask", verify_shards=False)) >= 3 * 7 - 3


def test_a_substitute_is_always_checked(manifest):
    """Also where only a part of the samples is: a second choice is none of damaged ones."""
    misstate_checksums(store_zeros(manifest, 2, [7]), 2, [8])
    batches = train(manifest, "substitute", verify_shards=False, check_rate=0.0)
    assert sum(batch.bad_samples for batch in batches) > 1
    for batch in batches:
        assert batch.uids.tolist().count(uid(2, 9)) >= batch.bad_samples


@pytest.mark.parametrize("policy", ["substitute", "mask"])
@pytest.mark.parametrize("kind", SILENT)
def test_each_is_told_of_once(manifest, sound, policy, kind, caplog):
    SILENT[kind](manifest, 2, [7])
    batches = train(manifest, policy)
    told = [record for record in caplog.records if "slot 7" in record.message]
    places = rows_with(sound, {uid(2, 7)})
    assert all(f"batch {sound[i].position}:" in record.message for (i, _), record in zip(places, told, strict=True))
    assert sum(batch.bad_samples for batch in batches) == len(places)
    for record in told:
        assert record.levelno == logging.WARNING and f"slot 7, uid {uid(2, 7)}:" in record.message
        assert str(manifest.shard_path(2)) in record.message
        assert ("left out" if policy == "mask" else f" uid {uid(2, 8)} ") in record.message
    # And once that the shard is not the one of the manifest.
    rest = [record.message for record in caplog.records if record not in told]
    assert len(rest) == 1 and str(manifest.shard_path(2)) in rest[0] and "the manifest says xxh3_128" in rest[0]


def test_a_shard_is_told_of_once(manifest, caplog):
    misstate_checksums(manifest, 1, [2])
    misstate_checksums(manifest, 2, [2])
    order = TrainOrder(SHARDS, 1, 0)
    order.upcoming = lambda *_: []  # closed after each batch
    read(manifest, order, stop=120, bad_samples="mask", check_rate=0.0, prefetch=1)
    told = sorted(record.message.split(":")[0] for record in caplog.records if "the manifest says" in record.message)
    assert told == [str(manifest.shard_path(1)), str(manifest.shard_path(2))]


def test_in_a_shard_that_is_known_to_be_damaged_every_image_is_checked(manifest):
    flip_byte(manifest, 1, [4])
    batches = read(manifest, EvalOrder(SHARDS, 16), bad_samples="mask", check_rate=0.0)
    assert sum(batch.bad_samples for batch in batches) == 1


def test_fillers_are_not_counted(manifest, caplog):
    """They repeat the first sample of the dataset, which is told of in its own place."""
    flip_byte(manifest, 0, [0])
    order = EvalOrder(SHARDS, 16)  # 60 samples: 4 fillers
    with pytest.raises(DataError):
        read(manifest, order, verify_shards=False)
    reading = asdict(Reading(bad_samples="substitute", verify_shards=False).for_evaluation())
    for world in (1, 2, 4):
        caplog.clear()
        bad = valid = 0
        for rank in range(world):
            for batch in read(manifest, order, rank=rank, world=world, **reading):
                bad, valid = bad + batch.bad_samples, valid + int(batch.mask.sum())
                assert (batch.images[~batch.mask] == 0).all()
        assert (bad, valid, len(caplog.records)) == (1, 59, 1)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "change, problem",
    [
        ("missing", "missing, but the manifest lists it|cannot be opened"),
        ("shorter", "BYTES bytes"),
        ("longer", "BYTES bytes"),
        ("empty", "BYTES bytes"),
        ("another shard", "this is another shard|the manifest says xxh3_128"),
        ("wrong head", "damaged"),
        ("another count", r"\b20\b.*\b19\b"),
    ],
)
def test_always_an_error(manifest, verify, change, problem, caplog):
    path = manifest.shard_path(2)
    content = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "another shard":
        flip(path, METADATA + 24)  # the uid of slot 0
    elif change == "wrong head":
        flip(path, 0)
    elif change == "another count":
        shards = list(manifest.shards)
        shards[2] = shards[2].model_copy(update={"samples": 19})
        changed = {"num_samples": 59, "shards": tuple(shards)}
        manifest = manifest.model_copy(update=changed).save(manifest.directory)
    else:
        path.write_bytes({"shorter": content[:-1], "longer": content + b"\0", "empty": b""}[change])
    problem = problem.replace("BYTES", f"{len(content):,}")
    for policy in ("error", "substitute", "mask"):
        with pytest.raises(DataError, match=rf"{path}: .*({problem})"):
            train(manifest, policy, verify_shards=verify)
    if change in ("missing", "shorter", "longer", "empty"):
        assert not caplog.records  # none that says that it is used


@pytest.mark.parametrize(("policy", "slot"), [("mask", 0), ("mask", 11), ("substitute", 11)])
def test_a_file_that_is_cut_while_it_is_read(manifest, sound, policy, slot, caplog):
    """No crash, no other counts: what is not there any more is left out or replaced, and what is there stays."""
    with loader_of(manifest, bad_samples=policy, prefetch=1, **OPTIONS) as loader:
        batches = [next(loader)]
        cut_before(manifest, 2, slot)
        batches += list(loader)
    for i, (before, after) in enumerate(zip(sound, batches, strict=True)):
        gone = (before.uids >= uid(2, slot)) & (before.uids < uid(3, 0))
        stays = (after.uids == before.uids) & after.mask
        assert len(after.mask) == BATCH and torch.equal(after.images[stays], before.images[stays])
        assert (after.mask if policy == "substitute" else after.uids == before.uids).all()
        if i > 3:  # the first four may have been read before
            assert torch.equal(stays, ~gone) and (policy == "mask" or (after.uids[gone] == uid(2, 0)).all())
    assert any("the file ends after 0 of its" in record.message for record in caplog.records)
    with pytest.raises(DataError):
        train(manifest, "error", verify_shards=False)  # for whoever opens it, the file has another size


@pytest.mark.parametrize("policy", ["error", "substitute"])
def test_a_file_that_is_emptied_while_it_is_read_is_an_error(manifest, policy):
    """No SIGBUS, and no substitute is left."""
    with loader_of(manifest, bad_samples=policy, prefetch=1) as loader:
        next(loader)
        for index in range(4):
            os.truncate(manifest.shard_path(index), 5000)
        # A shard's first sample keeps its first 8 bytes.
        with pytest.raises(DataError, match=r"shard-0000\d\.beton: slot \d+, uid \d+: .*\b[08] of\b"):
            for _ in loader:
                pass
        assert list(loader) == []  # it has ended


@pytest.fixture(scope="module")
def all_misstated(tmp_path_factory):
    """Every stored checksum is wrong, and every image is sound: what is masked is what is checked."""
    manifest = write_pictures(tmp_path_factory.mktemp("rate") / "data", SHARDS)
    for index, size in enumerate(SHARDS):
        misstate_checksums(manifest, index, list(range(size)))
    return manifest


def checked(manifest, rate, steps=150, **options):
    """{(epoch, uid)} of what is checked, and of all."""
    batches = train(manifest, "mask", stop=steps, verify_shards=False, check_rate=rate, **options)
    everything = [(b.epoch, one, ok) for b in batches for one, ok in zip(b.uids.tolist(), b.mask.tolist(), strict=True)]
    return {place[:2] for place in everything if not place[2]}, {place[:2] for place in everything}


def test_the_share_that_is_checked(all_misstated):
    assert checked(all_misstated, 0.0, 20)[0] == set()
    found, everything = checked(all_misstated, 1.0, 20)
    assert found == everything
    for rate in (0.1, 0.5, 0.9):
        found, everything = checked(all_misstated, rate)
        assert len(everything) == 150 * BATCH  # 1,800: six standard deviations
        assert abs(len(found) - rate * len(everything)) < 6 * (rate * (1 - rate) * len(everything)) ** 0.5


def test_which_are_checked_is_a_function_of_seed_epoch_and_uid(all_misstated):
    found, _ = checked(all_misstated, 0.5, 40)
    for transform, side, threads in ((ResizeTransform(), 8, 1), (EvalTransform(), 5, 4)):
        assert checked(all_misstated, 0.5, 40, transform=transform, side=side, threads=threads)[0] == found
    ranks = [checked(all_misstated, 0.5, 40, rank=rank, world=4)[0] for rank in range(4)]
    assert set.union(*ranks) == found
    resumed, rest = checked(all_misstated, 0.5, 40, start=17)
    assert resumed == found & rest
    more, _ = checked(all_misstated, 0.7, 40)
    assert found < more  # who checks more checks the same ones too
    by_epoch = [{one for epoch, one in found if epoch == number} for number in range(8)]
    assert len(set(map(frozenset, by_epoch))) == 8
    other, _ = checked(all_misstated, 0.5, 40, seed=SEED + 1)
    assert 0.3 < len(other & found) / len(found) < 0.7
    assert all(0.2 < len(one) / 60 < 0.8 for one in by_epoch)


def test_the_first_of_several_is_named(manifest):
    flip_byte(manifest, 0, [3, 4, 10, 14])
    for threads in (1, 2, 3, 4):
        with pytest.raises(DataError, match="slot 3, uid 9:"):
            read(manifest, EvalOrder(SHARDS, 16), threads=threads, verify_shards=False)


def test_shards_that_will_be_needed_are_compared_ahead(original, tmp_path, monkeypatch):
    """While others are read: the reading does not wait for it then."""
    seen, inner = [], open_shards.verify_once
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
        assert [next(loader).position for _ in range(20)] == list(range(10, 30))
