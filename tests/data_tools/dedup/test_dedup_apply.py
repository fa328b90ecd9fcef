"""`apply`: what is left, as a view and as a copy, is the dataset without what `find` has listed, and trains."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from messages import refusal
from planted_copies import OWN, PLANTED, URL
from stored_dataset import Photo, write_dataset

from data_tools.conversion import convert
from data_tools.dedup.applying import Removal, write_view
from data_tools.dedup.copying import write_copy
from data_tools.dedup.finding import find
from data_tools.engines.inline import run_inline
from data_tools.request import Request
from data_tools.sources import SourceOptions
from data_tools.subset import write_subset
from vitscale.data import EvalOrder, EvalTransform, Loader, TrainOrder
from vitscale.errors import DataError, RecipeError
from vitscale.shards import Manifest, ShardFile
from vitscale.shards.verify import verify


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
    view = write_view(removal_of(planted, found), str(tmp_path / "deep" / "view"))
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
    view = write_view(removal_of(planted, found), str(tmp_path / "view"))
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
        view = write_view(removal_of(planted, tmp_path / f"found-{name}", dataset), str(out))
        left = {u: facts for u, facts in left.items() if PLANTED.get(facts[-1]["key"], ("",))[0] != name}
        assert samples(out) == left and not verify(view).damage
        assert len(view.options["dedup_against"]) == step + 1
        dataset = out
    assert view.num_removed == 30 - len(left) and set(left) == {uid for uid in expected(planted) if uid < 30}
    result = find(str(dataset), [str(planted.indexes["birds"])], str(tmp_path / "again"), run_inline)
    assert result.tally.removed == 0
    with (tmp_path / "again" / "contaminated.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1


# --------------------------------------------------------------------------------------------------------------- copies


def test_a_copy_holds_what_is_left(found, planted, tmp_path):
    copy = write_copy(removal_of(planted, found), str(tmp_path / "copy"), run_inline)
    assert samples(tmp_path / "copy") == expected(planted)
    view = write_view(removal_of(planted, found), str(tmp_path / "view"))
    left_out = {"shards"}
    assert copy.model_dump(exclude=left_out) == view.model_dump(exclude=left_out)
    assert [shard.samples for shard in copy.shards] == [shard.num_selected for shard in view.shards]
    assert not verify(copy).damage and not verify(copy).notes
    again = write_copy(removal_of(planted, found), str(tmp_path / "again"), run_inline)
    assert again.sha256 == copy.sha256
    assert contents(tmp_path / "again") == contents(tmp_path / "copy")


class _KilledError(Exception):
    pass


def killed_after(count):
    """A runner that ends after so many tasks, as a killed process does: nothing after them is written."""

    def run(tasks, tick):
        for number, result in enumerate(run_inline(tasks, tick)):
            if number == count:
                raise _KilledError
            yield result

    return run


def test_a_killed_copy_goes_on(found, planted, tmp_path):
    removal = removal_of(planted, found)
    write_copy(removal, str(tmp_path / "whole"), run_inline)
    out = tmp_path / "out"
    for count in (0, 1):
        with pytest.raises(_KilledError):
            write_copy(removal, str(out), killed_after(count))
        assert not (out / "manifest.json").exists()
    (out / ".shard-00004.beton.0123abcd.part").write_bytes(b"of a worker that was killed")
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.beton")}
    assert len(done) >= 3
    write_copy(removal, str(out), run_inline)
    assert contents(out) == contents(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())


def test_a_copy_begun_of_something_else_is_left_alone(found, planted, tmp_path):
    removal, out = removal_of(planted, found), str(tmp_path / "out")
    with pytest.raises(_KilledError):
        write_copy(removal, out, killed_after(1))
    with pytest.raises(RecipeError, match=out):
        write_copy(replace(removal, sha256="0" * 64), out, run_inline)


def test_a_shard_of_which_nothing_is_left_disappears(found, planted, tmp_path):
    whole = samples(planted.dataset)
    uids = np.array([uid for uid in whole if 9 <= uid < 18 or uid in (0, 20)])
    removal = replace(removal_of(planted, found), uids=uids)
    for write in (lambda out: write_view(removal, out), lambda out: write_copy(removal, out, run_inline)):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        written = write(str(out))
        assert len(written.shards) == len(Manifest.load(planted.dataset).shards) - 1
        assert samples(out) == {uid: facts for uid, facts in whole.items() if uid not in uids}
        assert not verify(written).damage


def test_copies_keep_lists_of_labels_and_tables_of_any_version(planted, found, tmp_path):
    photos = [Photo(f"{i}.jpg", ((0, 1), (1,), ())[i % 3], seed=i) for i in range(7)]
    manifest = write_dataset(tmp_path / "ds", photos, 4)
    for path in (tmp_path / "ds").glob("*.idx.parquet"):
        table = pq.read_table(path).drop_columns(["pixels", "pdq", "pdq_quality", "pdq_trimmed"])
        pq.write_table(table.replace_schema_metadata(None), path)
    removal = replace(removal_of(planted, found), manifest=manifest, uids=np.array([1, 5]))
    copy = write_copy(removal, str(tmp_path / "copy"), run_inline)
    assert not verify(copy).damage and copy.fields[-1] == "labels"
    labels = {}
    for index in range(len(copy.shards)):
        with ShardFile(copy.shard_path(index)) as shard:
            labels |= {int(shard.uid[slot]): tuple(shard.labels(slot).tolist()) for slot in range(shard.samples)}
    assert labels == {uid: photos[uid].labels for uid in (0, 2, 3, 4, 6)}


def test_a_damaged_image_is_not_copied(found, planted, tmp_path):
    shutil.copytree(planted.dataset, tmp_path / "ds")
    path = tmp_path / "ds" / "shard-00002.beton"
    with ShardFile(path) as shard:
        position = int(shard.offset[8]) + 300
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    removal = replace(removal_of(planted, found, tmp_path / "ds"), uids=np.array([3]))
    with pytest.raises(DataError, match=r"shard-00002\.beton: uid \d+"):
        write_copy(removal, str(tmp_path / "copy"), run_inline)
    assert not (tmp_path / "copy" / "manifest.json").exists()
    assert not (tmp_path / "copy" / "shard-00002.beton").exists()


def test_at_a_url(found, planted):
    """The same dataset, by its bytes, so what was found on this machine holds there."""
    removal, memory = removal_of(planted, found, URL), fsspec.filesystem("memory")
    try:
        view = write_view(removal, "memory://planted/view")
        copy = write_copy(removal, "memory://planted/copy", run_inline)
        assert not verify(view).damage and not verify(copy).damage
        assert view.num_samples == copy.num_samples == OWN
        names = {Path(path).name for path in memory.ls("/planted/copy", detail=False)}
        tables = {f"shard-{i:05d}.{end}" for i in range(len(copy.shards)) for end in ("beton", "idx.parquet")}
        assert names == tables | {"manifest.json", "dedup.parquet"}
    finally:
        for folder in ("/planted/view", "/planted/copy"):
            memory.rm(folder, recursive=True)


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


@pytest.mark.parametrize("write", ["view", "copy"])
def test_out_must_be_new_or_empty(found, planted, tmp_path, write):
    removal = removal_of(planted, found)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    for out in (tmp_path / "full", tmp_path / "full" / "mine.txt", planted.dataset):
        with refusal(RecipeError, "dedup", f"{write} to {out.name}", {out: "OUT"}):
            write_view(removal, str(out)) if write == "view" else write_copy(removal, str(out), run_inline)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_uids_that_the_shards_do_not_have(found, planted, tmp_path):
    removal = replace(removal_of(planted, found), uids=np.array([4, 10**6]))
    with pytest.raises(DataError, match=r"\b0 of\b.*\b1\b"):
        write_view(removal, str(tmp_path / "view"))
    assert not list((tmp_path / "view").iterdir())
    with pytest.raises(DataError, match=r"\b0 of\b.*\b1\b"):
        write_copy(removal, str(tmp_path / "copy"), run_inline)
