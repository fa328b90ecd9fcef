"""`apply`: what is left, as a view, is the dataset without what `find` has listed, and trains."""

import csv
import json
import shutil
from dataclasses import replace

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from messages import refusal
from planted_copies import OWN, PLANTED, URL

from data_tools.conversion import convert
from data_tools.dedup.finding import Removal, find
from data_tools.request import Request
from data_tools.sources import SourceOptions
from data_tools.tasks import run_inline
from data_tools.views import write_subset
from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.shards import Manifest, ShardFile
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError


def removal_of(planted, found, dataset=None):
    return Removal.of(str(dataset or planted.dataset), str(found))


def samples(dataset):
    """What a dataset selects, by uid: image, label, checksum and row of provenance."""
    manifest, all_of = Manifest.load(dataset), {}
    for index in range(len(manifest.shards)):
        path = manifest.shard_path(index)
        slots = manifest.selected_slots(index)
        rows = pq.read_table(path.with_suffix(".idx.parquet")).to_pylist()
        with ShardFile(path) as shard:
            for slot in range(shard.samples) if slots is None else slots.tolist():
                facts = (shard.read(slot), shard.labels(slot), int(shard.label[slot]), int(shard.crc[slot]), rows[slot])
                all_of[int(shard.uid[slot])] = facts
    assert len(all_of) == manifest.num_samples
    return all_of


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expected(planted):
    """What must be left, by what was planted."""
    whole = samples(planted.dataset)
    left = {uid: facts for uid, facts in whole.items() if facts[-1]["key"] not in PLANTED}
    assert len(left) == OWN == len(whole) - len(PLANTED)
    return left


def test_a_view_is_what_is_left(found, planted, tmp_path):
    before = contents(planted.dataset)
    view = removal_of(planted, found).write(str(tmp_path / "deep" / "view"))
    assert samples(tmp_path / "deep" / "view") == expected(planted)
    whole = Manifest.load(planted.dataset)
    assert (view.num_removed, view.class_names, view.shuffle_seed) == (len(PLANTED), whole.class_names, 3)
    indexes = [json.loads((planted.indexes[name] / "index.json").read_text()) for name in ("birds", "fish")]
    against = view.options.pop("dedup_against")
    assert [one["test_sets"] for one in against] == [[one["test_sets"][0]["name"]] for one in indexes]
    assert view.options == whole.options
    names = {path.name for path in (tmp_path / "deep" / "view").iterdir()}
    assert names - {"manifest.json", "dedup.parquet"} == {
        f"shard-{index:05d}.excluded.npy" for index, shard in enumerate(view.shards) if shard.select != "all"
    }
    assert not verify(view).damage
    assert contents(planted.dataset) == before


def test_a_view_trains(found, planted, tmp_path):
    view = removal_of(planted, found).write(str(tmp_path / "view"))
    sizes = [shard.num_selected for shard in view.shards]
    assert TrainOrder(sizes, 8, seed=0).num_samples == OWN
    order = EvalOrder(sizes, 8)
    with Loader(view, order, image_size=16, transform=EvalTransform("square", 1.0)) as loader:
        uids = [uid for batch in loader for uid in batch.uids[batch.mask].tolist()]
    assert uids == sorted(expected(planted))


def test_what_was_found_in_a_subset_leaves_the_subset(planted, tmp_path):
    """And a view of a view: the second comparison's index is another, and both are told."""
    write_subset(str(planted.dataset), str(tmp_path / "subset"), 30)
    dataset, left = tmp_path / "subset", {u: facts for u, facts in samples(planted.dataset).items() if u < 30}
    for step, name in enumerate(("fish", "birds")):
        find(str(dataset), [str(planted.indexes[name])], str(tmp_path / f"found-{name}"), run_inline)
        out = tmp_path / f"without-{name}"
        view = removal_of(planted, tmp_path / f"found-{name}", dataset).write(str(out))
        left = {u: facts for u, facts in left.items() if PLANTED.get(facts[-1]["key"], ("",))[0] != name}
        assert samples(out) == left and not verify(view).damage
        assert len(view.options["dedup_against"]) == step + 1
        dataset = out
    assert view.num_removed == 30 - len(left) and set(left) == {uid for uid in expected(planted) if uid < 30}
    result = find(str(dataset), [str(planted.indexes["birds"])], str(tmp_path / "again"), run_inline)
    assert result.findings.removed == 0
    with (tmp_path / "again" / "contaminated.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1


def test_a_shard_of_which_nothing_is_left_disappears(found, planted, tmp_path):
    whole = samples(planted.dataset)
    uids = np.array([uid for uid in whole if 9 <= uid < 18 or uid in (0, 20)])
    removal = replace(removal_of(planted, found), uids=uids)
    written = removal.write(str(tmp_path / "view"))
    assert len(written.shards) == len(Manifest.load(planted.dataset).shards) - 1
    assert samples(tmp_path / "view") == {uid: facts for uid, facts in whole.items() if uid not in uids}
    assert not verify(written).damage


def test_at_a_url(found, planted):
    """The same dataset, by its bytes, so what was found on this machine holds there."""
    removal, memory = removal_of(planted, found, URL), fsspec.filesystem("memory")
    try:
        view = removal.write("memory://planted/view")
        assert not verify(view).damage and view.num_samples == OWN
    finally:
        memory.rm("/planted/view", recursive=True)


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_what_does_not_belong_to_the_dataset_is_refused(found, planted, tmp_path):
    write_subset(str(planted.dataset), str(tmp_path / "subset"), 20)
    with pytest.raises(RecipeError, match="vitscale dedup find"):
        removal_of(planted, found, tmp_path / "subset")
    with pytest.raises(DataError, match="vitscale dedup find"):
        removal_of(planted, tmp_path / "subset")
    for name, damage in (
        ("dedup.parquet", None),
        ("dedup.parquet", b"x"),
        ("found.json", b"{}"),
        ("found.json", b'{"version": 1'),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(found, broken)
        (broken / name).unlink()
        if damage is not None:
            (broken / name).write_bytes(damage)
        with refusal(DataError, "dedup", f"{name} {damage!r}", {broken: "FOUND"}):
            removal_of(planted, broken)
        shutil.rmtree(broken)


def test_nothing_left_is_refused(planted, tmp_path):
    """A training set that is the test set itself."""
    url = "memory://planted/fish"
    try:
        convert(Request(str(planted.test_sets["fish"]), source=SourceOptions(unlabelled=True)), url)
        find(url, [str(planted.indexes["fish"])], str(tmp_path / "found"), run_inline)
        with pytest.raises(RecipeError, match=r"\b6 samples\b"):
            Removal.of(url, str(tmp_path / "found"))
    finally:
        fsspec.filesystem("memory").rm("/planted/fish", recursive=True)


def test_out_must_be_new_or_empty(found, planted, tmp_path):
    removal = removal_of(planted, found)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    for out in (tmp_path / "full", tmp_path / "full" / "mine.txt", planted.dataset):
        with refusal(RecipeError, "dedup", f"view to {out.name}", {out: "OUT"}):
            removal.write(str(out))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_uids_that_the_shards_do_not_have(found, planted, tmp_path):
    removal = replace(removal_of(planted, found), uids=np.array([4, 10**6]))
    with pytest.raises(DataError, match=r"\b0 of\b.*\b1\b"):
        removal.write(str(tmp_path / "view"))
    assert not list((tmp_path / "view").iterdir())
