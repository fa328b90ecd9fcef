import hashlib
import json
import os
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
from datasets_on_disk import uids

from data_tools.request import parse_count
from data_tools.views import write_subset
from vitscale.data.shards import ExcludedSlots, Manifest, SelectExclude
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """23 samples in shards of 10, 10 and 3."""
    folder = tmp_path_factory.mktemp("subset") / "jft" / "train"
    write_generated_dataset(folder, [10, 10, 3])
    return folder


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 22, 23])
def test_a_subset_is_a_prefix(whole, tmp_path, count):
    subset = write_subset(str(whole), str(tmp_path / "deep" / "out"), count)
    assert subset.num_samples == count and uids(tmp_path / "deep" / "out") == list(range(count))
    assert [path.name for path in (tmp_path / "deep" / "out").iterdir()] == ["manifest.json"]
    all_of = Manifest.load(whole)
    assert (subset.class_names, subset.options, subset.shuffle_seed) == (
        all_of.class_names,
        all_of.options,
        all_of.shuffle_seed,
    )
    for shard in subset.shards:
        assert shard.path == f"{os.path.relpath(whole, tmp_path / 'deep' / 'out')}/{Path(shard.path).name}"
    assert not verify(subset).damage


def test_subsets_are_nested_and_have_subsets(whole, tmp_path):
    for count in (14, 12, 3):
        write_subset(str(whole), str(tmp_path / str(count)), count)
    assert set(uids(tmp_path / "3")) < set(uids(tmp_path / "12")) < set(uids(tmp_path / "14"))
    again = write_subset(str(tmp_path / "14" / "manifest.json"), str(tmp_path / "of-14"), 12)
    assert again.sha256 == Manifest.load(tmp_path / "12").sha256
    with pytest.raises(RecipeError, match=r"15 samples.*\b14\b"):
        write_subset(str(tmp_path / "14"), str(tmp_path / "more"), 15)
    assert not (tmp_path / "more").exists()


def view(whole, out, excluded):
    """A view without some slots of each shard, as de-duplication makes it."""
    out.mkdir()
    manifest = Manifest.load(whole)
    shards = []
    for index, (entry, slots) in enumerate(zip(manifest.shards, excluded, strict=True)):
        entry = entry.model_copy(update={"path": os.path.relpath(manifest.shard_path(index), out)})
        if slots:
            np.save(out / f"{index}.npy", np.array(slots, np.uint32))
            digest = hashlib.sha256((out / f"{index}.npy").read_bytes()).hexdigest()
            listed = ExcludedSlots(path=f"{index}.npy", sha256=digest, count=len(slots))
            entry = entry.model_copy(update={"select": SelectExclude(exclude=listed)})
        shards.append(entry)
    samples = sum(entry.num_selected for entry in shards)
    manifest.model_copy(update={"shards": tuple(shards), "num_samples": samples}).save(out)
    return uids(out)


@pytest.mark.parametrize("count", [*range(1, 17)])
def test_what_a_view_excludes_stays_out(whole, tmp_path, count):
    left = view(whole, tmp_path / "view", [[0, 4], [3, 8, 9], [1, 2]])
    assert len(left) == 16
    out = tmp_path / "a" / "subset"
    subset = write_subset(str(tmp_path / "view"), str(out), count)
    assert uids(out) == left[:count]
    first = subset.shards[0].select
    if count >= 8:
        assert first.exclude.path == "../../view/0.npy"
    assert not verify(subset).damage
    for fewer in range(1, count):
        nested = tmp_path / f"nested-{fewer}"
        write_subset(str(out), str(nested), fewer)
        assert uids(nested) == left[:fewer]


def test_links_are_followed_before_paths_are_made(whole, tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    (tmp_path / "train").symlink_to(whole)
    write_subset(str(tmp_path / "train"), str(tmp_path / "link" / "out"), 12)
    assert uids(tmp_path / "link" / "out") == uids(tmp_path / "far" / "away" / "out") == list(range(12))


def test_out_must_be_new_or_empty(whole, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(RecipeError, match=str(tmp_path / "file")):
        write_subset(str(whole), str(tmp_path / "file"), 3)
    with pytest.raises(RecipeError, match=r"mine\.txt"):
        write_subset(str(whole), str(tmp_path / "full"), 3)
    with pytest.raises(RecipeError, match="0 samples"):
        write_subset(str(whole), str(tmp_path / "new"), 0)
    with pytest.raises(DataError, match=str(tmp_path / "full")):
        write_subset(str(tmp_path / "full"), str(tmp_path / "new"), 3)
    with pytest.raises(DataError, match=str(tmp_path / "file" / "new")):
        write_subset(str(whole), str(tmp_path / "file" / "new"), 3)


def test_at_a_url(whole, tmp_path):
    memory = fsspec.filesystem("memory")
    view(whole, tmp_path / "view", [[0, 4], [], []])
    for path in whole.iterdir():
        memory.put(str(path), f"/bucket/jft/train/{path.name}")
    memory.put(str(tmp_path / "view" / "0.npy"), "/bucket/jft/train/0.npy")
    data = json.loads((tmp_path / "view" / "manifest.json").read_text())
    del data["checksum"]
    for shard in data["shards"]:
        shard["path"] = Path(shard["path"]).name
    memory.pipe_file("/bucket/jft/train/manifest.json", json.dumps(data).encode())
    try:
        write_subset("memory://bucket/jft/train", "memory://bucket/out/18", 18)
        subset = write_subset("memory://bucket/jft/train", "memory://bucket/out/5", 5)
        assert sorted(memory.ls("/bucket/out/5", detail=False)) == [
            "/bucket/out/5/manifest.json",
            "/bucket/out/5/shard-00000.excluded.npy",
        ]
        assert subset.selected_slots(0).tolist() == [1, 2, 3, 5, 6]
        assert subset.shards[0].path == "../../jft/train/shard-00000.beton"
        verdict = verify(Manifest.load("memory://bucket/out/18"))
        assert (verdict.damage, verdict.samples) == ([], 20)
        with pytest.raises(RecipeError, match="memory://bucket"):
            write_subset("memory://bucket/jft/train", "memory://other/5", 5)
        with pytest.raises(RecipeError, match="memory://bucket"):
            write_subset("memory://bucket/jft/train", str(tmp_path / "new"), 5)
        with pytest.raises(RecipeError, match="memory://bucket/new"):
            write_subset(str(whole), "memory://bucket/new", 5)
        with pytest.raises(RecipeError, match="memory://bucket/out/5"):
            write_subset("memory://bucket/jft/train", "memory://bucket/out/5", 5)
    finally:
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("9M", 9_000_000),
        ("90m", 90_000_000),
        ("30k", 30_000),
        ("30K", 30_000),
        ("1.5M", 1_500_000),
        ("1_000", 1000),
        ("1000", 1000),
        ("1B", 10**9),
        (" 7 ", 7),
        ("0.3B", 300_000_000),
        ("1.0005k", None),
        ("0.5", None),
        ("0", None),
        ("-3", None),
        ("9 M", None),
        ("9MB", None),
        ("1e6", None),
        ("", None),
        ("M", None),
        ("_1", None),
        ("٣", None),
        ("1,000", None),
    ],
)
def test_counts(text, count):
    if count is not None:
        assert parse_count(text) == count
    else:
        with pytest.raises(RecipeError, match=re.escape(repr(text))):
            parse_count(text)
