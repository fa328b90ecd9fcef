"""What a run has seen, told from its files: the inverse of the order, and the pixels once more.

Compared with a log of what the run's loader handed out, and with the digests in its metrics.
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import metrics, seen_again, stored_bytes, uids_of
from PIL import Image
from rank_faults import poison
from ranks import STEPS, job, launch, make_data

from vitscale.about.checks.seen import Content, History, steps_of
from vitscale.data.order import TrainOrder
from vitscale.data.shards import Manifest
from vitscale.ground.errors import CheckpointError, DataError, RecipeError
from vitscale.training.watching.anomalies import SkippedData

SKIPPED = 3  # the batch with a bad loss


@settings(deadline=None)
@given(
    shards=st.lists(st.integers(0, 90), min_size=1, max_size=9).filter(lambda shards: sum(shards) >= 16),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    repeats=st.sampled_from([1, 1, 3, 4]),
)
def test_find_is_the_inverse_of_batch(shards, seed, epoch, repeats):
    order = TrainOrder(shards, 16, seed, repeats)
    stood = {}
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        slots = order.batch(step, 0, 16)
        for slot, sample in enumerate(zip(slots.shard, slots.position, strict=True)):
            stood.setdefault(sample, (step, []))[1].append(slot)
    for shard, count in enumerate(shards):
        for position in range(count):
            steps, slots = order.find(np.array([shard]), np.array([position]), epoch)
            found = None if steps[0] < 0 else (int(steps[0]), list(order.views(int(slots[0]))))
            assert found == stood.get((shard, position))
    everything = [(shard, position) for shard, count in enumerate(shards) for position in range(count)]
    steps, slots = order.find(*np.array(everything, np.int64).T, epoch)
    for sample, step, slot in zip(everything, steps.tolist(), slots.tolist(), strict=True):
        assert (None if step < 0 else (step, list(order.views(slot)))) == stood.get(sample)


def test_a_dataset_of_several_windows_is_inverted_as_well():
    order = TrainOrder([70_000] * 12, 64, 1)
    slots = order.batch(order.steps_per_epoch + 2500, 0, 64)
    steps, found = order.find(slots.shard, slots.position, 1)
    assert set(steps.tolist()) == {order.steps_per_epoch + 2500} and found.tolist() == list(range(64))


def test_steps_are_counted_without_batches_that_were_left_out():
    skipped = SkippedData(((2, 4), (7, 8)))
    assert steps_of(np.arange(9), skipped).tolist() == [1, 2, 0, 0, 3, 4, 5, 0, 6]


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """A run that has left a batch out, over more than an epoch of 6 batches."""
    blocks = {
        "schedule": {"duration": {"steps": 2 * STEPS}},
        "checkpoint": {"every": {"steps": 2}, "keep": 20},
        "evaluation": {"validation": None},
        "anomalies": {"non_finite": "skip"},
    }
    bad = partial(poison, positions={SKIPPED: "nan"}, rank=0, row=1)
    mixed = {
        "data": {"repeats": 3, "operations": [{"kind": "randaugment", "set": "timm"}]},
        "objective": {"mixing": {"mixup": 0.8}},
        "evaluation": {"validation": None},
    }
    launch(root, [job("run", blocks, faults=[bad]), job("mixed", mixed)], 1)
    return root


@pytest.fixture(scope="module")
def history(root) -> History:
    return History(root / "runs" / "run")


@pytest.fixture(scope="module")
def uids(root) -> list[int]:
    return uids_of(Manifest.load(root / "train"))


@pytest.mark.parametrize("name", ["run", "mixed"])
def test_sightings_and_pixels_are_those_of_the_run(root, uids, name):
    history = History(root / "runs" / name)
    digests, sightings = seen_again(history, uids)
    lines, seen = metrics(root, name), Counter(sighting.step for _, sighting in sightings)
    left_out = {None} if name == "run" else set()
    assert set(seen.values()) == {16} and set(seen) == {*left_out, *(line["step"] for line in lines)}
    slots = {(each.batch, each.slot): uid for uid, each in sightings}
    for _, each in sightings:
        assert each.partner == (slots[each.batch, each.slot ^ 1] if name == "mixed" else None)
    assert [digests[line["step"]] for line in lines] == [line["batch_digest"] for line in lines]


def run_seen(root, *arguments):
    _, printed = run("seen", *arguments, "--run", root / "runs" / "run", "--json")
    return [json.loads(line) for line in printed.splitlines()]


def test_an_image_is_found_by_its_bytes_and_shown_as_it_was_seen(root, history, uids, tmp_path):
    (place,) = history.find([uids[30]])
    (tmp_path / "photo.jpg").write_bytes(stored_bytes(history, place.uid))
    Image.new("RGB", (40, 30), "red").save(tmp_path / "other.png")
    found, other, by_uid = run_seen(
        root, tmp_path / "photo.jpg", tmp_path / "other.png", place.uid, "--out", tmp_path / "pixels"
    )
    assert found["uid"] == place.uid and found["seen"] == by_uid["seen"] and len(found["seen"]) > 0
    assert other["uid"] is None and other["seen"] == []
    pictures = sorted((tmp_path / "pixels").iterdir())
    assert len(pictures) == len(found["seen"])
    batches = [history.pixels(each) for each in history.sightings([place])[0]]
    assert {np.asarray(Image.open(file)).tobytes() for file in pictures} == {
        batch.images[0].numpy().tobytes() for batch in batches
    }


def test_what_a_shard_selects_is_read_once_however_many_of_its_images_are_asked_for(root, uids, tmp_path, monkeypatch):
    history = History(root / "runs" / "run")
    for uid in uids[:20]:
        (tmp_path / f"{uid}.jpg").write_bytes(stored_bytes(history, uid))
    reads, read = Counter(), Manifest.slots

    def counted(manifest, index):
        reads[manifest.where, index] += 1
        return read(manifest, index)

    monkeypatch.setattr(Manifest, "slots", counted)
    found = history.holding([Content.of(path.read_bytes()) for path in sorted(tmp_path.iterdir())])
    assert {place.uid for _, place in found} >= set(uids[:20])
    assert set(reads.values()) == {1} and len(reads) == len(history.manifest.shards)


def test_a_copy_is_found_by_de_duplication(root, history, uids, tmp_path):
    (tmp_path / "original.jpg").write_bytes(stored_bytes(history, uids[5]))
    with Image.open(tmp_path / "original.jpg") as image:
        image.save(tmp_path / "again.png")  # the same pixels, other bytes
    rows = run_seen(root, tmp_path / "again.png", "--near")
    assert uids[5] in [row["uid"] for row in rows]


def test_what_cannot_be_told_is_said(root, tmp_path, uids):
    with pytest.raises(DataError):
        run_seen(root, max(uids) + 1)
    with pytest.raises(DataError):
        run_seen(root, tmp_path / "nothing.jpg")
    with pytest.raises(RecipeError):
        run_seen(root, uids[0], "--near")
    with pytest.raises(RecipeError):
        History(tmp_path)
    (tmp_path / "recipe.yaml").write_text((root / "runs" / "run" / "recipe.yaml").read_text())
    with pytest.raises(CheckpointError):
        History(tmp_path)
    make_other = tmp_path / "data"
    make_other.mkdir()
    make_data(make_other)
    manifest = json.loads((make_other / "train" / "manifest.json").read_text())
    del manifest["checksum"]
    (make_other / "train" / "manifest.json").write_text(json.dumps(manifest | {"shuffle_seed": 77}))
    with pytest.raises(DataError):
        History(root / "runs" / "run", str(make_other))
