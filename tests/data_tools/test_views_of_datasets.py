"""Subsets and parts of a dataset: prefixes, disjoint and complete, the same on every machine, nothing copied."""

import json
import os
import re
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from commands import command
from datasets_on_disk import uids
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal
from small_files import upload, write_files

from data_tools.request import parse_count
from data_tools.views import Part, parse_parts, write_parts, write_subset, write_view
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_generated_dataset(tmp_path_factory.mktemp("subset") / "jft" / "train", [10, 10, 3]).directory


def view(whole, out, excluded):
    manifest = Manifest.load(whole)
    kept = ((index, np.setdiff1d(manifest.slots(index), slots)) for index, slots in enumerate(excluded))
    return uids(write_view(manifest, str(out), kept))


LEFT = [*(1, 2, 3, 5, 6, 7, 8, 9), *(10, 11, 12, 14, 15, 16, 17), 21]


@pytest.mark.parametrize(
    ("left", "count"),
    [*((range(23), count) for count in (1, 9, 10, 11, 20, 22, 23)), *((LEFT, count) for count in range(1, 17))],
)
def test_a_subset_is_a_prefix(whole, tmp_path, left, count):
    """Of a dataset, and of a view: what that excludes stays out."""
    if left == LEFT:
        assert view(whole, tmp_path / "view", [[0, 4], [3, 8, 9], [0, 2]]) == LEFT
    dataset, out = str(tmp_path / "view" if left == LEFT else whole), tmp_path / "deep" / "out"
    subset = write_subset(dataset, str(out), count)
    assert uids(out) == list(left[:count])
    for name in ("class_names", "options", "shuffle_seed"):
        assert getattr(subset, name) == getattr(Manifest.load(whole), name)
    for shard in subset.shards:
        assert shard.path == f"{os.path.relpath(whole, out)}/{Path(shard.path).name}"
    if left != LEFT:
        assert [path.name for path in out.iterdir()] == ["manifest.json"]
    elif count >= 8:
        assert subset.shards[0].select.exclude.path == "../../view/shard-00000.excluded.npy"
    assert not verify(subset).damage
    for fewer in range(1, count):
        nested = write_subset(str(out / "manifest.json"), str(tmp_path / f"{fewer}"), fewer)
        assert uids(nested) == list(left[:fewer])
        assert nested.sha256 == write_subset(dataset, str(tmp_path / f"{fewer} at once"), fewer).sha256


def test_links_are_followed_before_paths_are_made(whole, tmp_path):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    (tmp_path / "train").symlink_to(whole)
    write_subset(str(tmp_path / "train"), str(tmp_path / "link" / "out"), 12)
    assert uids(tmp_path / "link" / "out") == uids(tmp_path / "far" / "away" / "out") == list(range(12))


def test_out_must_be_new_or_empty(whole, tmp_path):
    write_files(tmp_path, "file", "full/mine.txt")
    for source, out, count, error, named in (
        (whole, "file", 3, RecipeError, f"{tmp_path}/file"),
        (whole, "full", 3, RecipeError, r"mine\.txt"),
        (whole, "new", 0, RecipeError, "0 samples"),
        (whole, "new", 24, RecipeError, r"24 samples.*\b23\b"),
        (tmp_path / "full", "new", 3, DataError, f"{tmp_path}/full"),
        (whole, "file/new", 3, DataError, f"{tmp_path}/file/new"),
    ):
        with pytest.raises(error, match=named):
            write_subset(str(source), str(tmp_path / out), count)
    assert not (tmp_path / "new").exists()


def test_at_a_url(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "bucket" / "jft" / "train")
    view(folder, tmp_path / "bucket" / "jft" / "view", [[0, 4], [], []])
    bucket = upload(tmp_path / "bucket", f"memory://{tmp_path.name}")
    train = f"{bucket}/jft/view"
    write_subset(train, f"{bucket}/out/18", 18)
    subset = write_subset(train, f"{bucket}/out/5", 5)
    found = fsspec.filesystem("memory").ls(f"{bucket}/out/5", detail=False)
    assert sorted(path.rpartition("/")[2] for path in found) == ["manifest.json", "shard-00000.excluded.npy"]
    assert subset.selected_slots(0).tolist() == [1, 2, 3, 5, 6]
    assert subset.shards[0].path == "../../jft/train/shard-00000.beton"
    verdict = verify(Manifest.load(f"{bucket}/out/18"))
    assert (verdict.damage, verdict.samples) == ([], 20)
    for source, out, named in (
        (train, "memory://other/5", bucket),
        (train, tmp_path / "new", bucket),
        (whole, f"{bucket}/new", f"{bucket}/new"),
        (train, f"{bucket}/out/5", f"{bucket}/out/5"),
    ):
        with pytest.raises(RecipeError, match=named):
            write_subset(str(source), str(out), 5)


def test_counts():
    counts = {"9M": 9e6, "90m": 9e7, "30k": 3e4, "30K": 3e4, "1.5M": 1.5e6, "0.3B": 3e8, "1B": 1e9}
    for text, count in {**counts, "1_000": 1000, "1000": 1000, " 7 ": 7}.items():
        assert parse_count(text) == count
    for text in ("1.0005k", "0.5", "0", "-3", "9 M", "9MB", "1e6", "", "M", "_1", "٣", "1,000"):
        with pytest.raises(RecipeError, match=re.escape(repr(text))):
            parse_count(text)


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    return write_generated_dataset(tmp_path_factory.mktemp("divided") / "toy" / "train", [100, 100, 3]).directory


def parts(*shares):
    return [Part(f"part-{index}", share) for index, share in enumerate(shares)]


@settings(max_examples=25, deadline=None)
@given(shares=st.lists(st.integers(2, 100), min_size=1, max_size=5), seed=st.integers(0, 2**64 - 1))
def test_every_sample_is_in_one_part_of_the_size_asked_for(divided, tmp_path_factory, shares, seed):
    written = write_parts(str(divided), str(tmp_path_factory.mktemp("parts")), parts(*shares), seed)
    sizes = [manifest.num_samples for manifest in written]
    assert sum(sizes) == 203
    assert all(abs(size - 203 * share / sum(shares)) < 1 for size, share in zip(sizes, shares, strict=True))
    assert sorted(uid for manifest in written for uid in uids(manifest)) == list(range(203))


def test_98_to_2_as_the_command_writes_them(divided, tmp_path):
    code, printed = command("shards", "split", divided, "--parts", "98,2").answer
    train, development = (Manifest.load(divided.parent / name) for name in ("train-98", "train-2"))
    assert (train.num_samples, development.num_samples) == (199, 4)
    assert code == 0 and str(divided.parent / "train-2") in printed
    assert not verify(train).damage and not verify(development).damage
    files = [path.name for folder in ("train-98", "train-2") for path in (divided.parent / folder).iterdir()]
    assert not [name for name in files if name.endswith(".beton")]
    assert (train.class_names, train.options) == (Manifest.load(divided).class_names, Manifest.load(divided).options)
    again = write_parts(str(divided), str(tmp_path), parse_parts("98,2", str(divided)))
    assert [uids(manifest) for manifest in again] == [uids(train), uids(development)]
    other = write_parts(str(divided), str(tmp_path / "other"), parts(98, 2), seed=1)
    assert uids(other[1]) != uids(development)


def test_parts_are_random(divided, tmp_path):
    half = uids(write_parts(str(divided), str(tmp_path), parts(1, 1))[0])
    # Of a random half: the mean of uids from 0 to 202 within five deviations, and not every other one.
    assert abs(np.mean(half) - 101) < 5 * 203 / (12 * 202) ** 0.5
    assert len(set(np.diff(half).tolist())) > 3


def test_how_a_dataset_is_sharded_plays_no_part(divided, tmp_path):
    write_generated_dataset(tmp_path / "other", [13] * 15 + [8])
    written = [write_parts(str(path), str(tmp_path / path.name), parts(9, 1)) for path in (divided, tmp_path / "other")]
    assert uids(written[0][1]) == uids(written[1][1])


def test_parts_of_a_part_keep_what_it_leaves_out(divided, tmp_path):
    write_subset(str(divided), str(tmp_path / "subset"), 150)
    half = write_parts(str(tmp_path / "subset"), str(tmp_path / "halves"), parts(1, 1))[0]
    quarters = write_parts(str(half.directory), str(tmp_path / "quarters"), parts(1, 1))
    assert sorted(uids(quarters[0]) + uids(quarters[1])) == uids(half)
    assert max(uids(half)) < 150


@pytest.mark.parametrize("text", ["98", "98,0", "98,x", "50,50", "a=1,a=2", "a/b=1,c=2", "-1,2", "", "1,,2", ".=1,b=2"])
def test_what_are_no_parts(divided, text):
    with pytest.raises(RecipeError):
        parse_parts(text, str(divided))


def test_names_are_given_or_made(divided):
    assert parse_parts("train98=98, 2", str(divided / "manifest.json")) == (Part("train98", 98.0), Part("train-2", 2.0))


def test_nothing_is_written_where_something_is_wrong(divided, tmp_path):
    with pytest.raises(RecipeError, match="part-1"):
        write_parts(str(divided), str(tmp_path / "new"), parts(10_000, 1))
    write_files(tmp_path / "new" / "part-1", "mine.txt")
    with refusal(RecipeError, "shards", "part whose folder is taken", {tmp_path: "FOLDER"}):
        write_parts(str(divided), str(tmp_path / "new"), parts(1, 1))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["part-1"]
    with pytest.raises(DataError):
        parse_parts("98,2", str(tmp_path))
    # A shard that is another than the manifest says ends it before any part is written.
    broken = tmp_path / "broken"
    write_generated_dataset(broken, [10, 10])
    content = json.loads((broken / "manifest.json").read_text())
    Path(broken, content["shards"][1]["path"]).write_bytes(b"")
    with pytest.raises(DataError):
        write_parts(str(broken), str(tmp_path / "of-broken"), parts(1, 1))
    assert not (tmp_path / "of-broken").exists()
