"""A dataset in parts: disjoint, complete, of the sizes asked for, the same on every machine, and nothing copied."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets_on_disk import uids
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal
from typer.testing import CliRunner

from data_tools.views import Part, parse_parts, write_parts, write_subset
from vitscale.cli.main import app
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import DataError, RecipeError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """203 samples in shards of 100, 100 and 3."""
    folder = tmp_path_factory.mktemp("divided") / "toy" / "train"
    write_generated_dataset(folder, [100, 100, 3])
    return folder


def parts(*shares):
    return [Part(f"part-{index}", share) for index, share in enumerate(shares)]


@settings(max_examples=25, deadline=None)
@given(shares=st.lists(st.integers(2, 100), min_size=1, max_size=5), seed=st.integers(0, 2**64 - 1))
def test_every_sample_is_in_one_part_of_the_size_asked_for(whole, tmp_path_factory, shares, seed):
    written = write_parts(str(whole), str(tmp_path_factory.mktemp("parts")), parts(*shares), seed)
    sizes = [manifest.num_samples for manifest in written]
    assert sum(sizes) == 203
    assert all(abs(size - 203 * share / sum(shares)) < 1 for size, share in zip(sizes, shares, strict=True))
    assert sorted(uid for manifest in written for uid in uids(manifest)) == list(range(203))


def test_98_to_2_as_the_command_writes_them(whole, tmp_path):
    """Published sizes: 49,000 and 1,000 of CIFAR's 50,000; here 199 and 4."""
    result = CliRunner().invoke(app, ["shards", "split", str(whole), "--parts", "98,2"])
    assert result.exit_code == 0, result.output
    train, development = (Manifest.load(whole.parent / name) for name in ("train-98", "train-2"))
    assert (train.num_samples, development.num_samples) == (199, 4)
    assert str(whole.parent / "train-2") in result.output
    assert not verify(train).damage and not verify(development).damage
    files = [path.name for folder in ("train-98", "train-2") for path in (whole.parent / folder).iterdir()]
    assert not [name for name in files if name.endswith(".beton")]
    assert (train.class_names, train.options) == (Manifest.load(whole).class_names, Manifest.load(whole).options)
    again = write_parts(str(whole), str(tmp_path), parse_parts("98,2", str(whole)))
    assert [uids(manifest) for manifest in again] == [uids(train), uids(development)]
    other = write_parts(str(whole), str(tmp_path / "other"), parts(98, 2), seed=1)
    assert uids(other[1]) != uids(development)


def test_parts_are_random(whole, tmp_path):
    half = uids(write_parts(str(whole), str(tmp_path), parts(1, 1))[0])
    # Of a random half: the mean of uids from 0 to 202 within five deviations, and not every other one.
    assert abs(np.mean(half) - 101) < 5 * 203 / (12 * 202) ** 0.5
    assert len(set(np.diff(half).tolist())) > 3


def test_how_a_dataset_is_sharded_plays_no_part(whole, tmp_path):
    write_generated_dataset(tmp_path / "other", [13] * 15 + [8])
    written = [write_parts(str(path), str(tmp_path / path.name), parts(9, 1)) for path in (whole, tmp_path / "other")]
    assert uids(written[0][1]) == uids(written[1][1])


def test_parts_of_a_part_keep_what_it_leaves_out(whole, tmp_path):
    write_subset(str(whole), str(tmp_path / "subset"), 150)
    half = write_parts(str(tmp_path / "subset"), str(tmp_path / "halves"), parts(1, 1))[0]
    quarters = write_parts(str(half.directory), str(tmp_path / "quarters"), parts(1, 1))
    assert sorted(uids(quarters[0]) + uids(quarters[1])) == uids(half)
    assert max(uids(half)) < 150


@pytest.mark.parametrize("text", ["98", "98,0", "98,x", "50,50", "a=1,a=2", "a/b=1,c=2", "-1,2", "", "1,,2", ".=1,b=2"])
def test_what_are_no_parts(whole, text):
    with pytest.raises(RecipeError):
        parse_parts(text, str(whole))


def test_names_are_given_or_made(whole):
    assert parse_parts("train98=98, 2", str(whole / "manifest.json")) == (Part("train98", 98.0), Part("train-2", 2.0))


def test_nothing_is_written_where_something_is_wrong(whole, tmp_path):
    with pytest.raises(RecipeError, match="part-1"):
        write_parts(str(whole), str(tmp_path / "new"), parts(10_000, 1))
    taken = tmp_path / "new" / "part-1"
    taken.mkdir(parents=True)
    (taken / "mine.txt").write_text("x")
    with refusal(RecipeError, "shards", "part whose folder is taken", {tmp_path: "FOLDER"}):
        write_parts(str(whole), str(tmp_path / "new"), parts(1, 1))
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
