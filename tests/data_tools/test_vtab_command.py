"""`vitscale vtab`: what it prepares and says, and its exit codes."""

import pytest
from typer.testing import CliRunner
from vtab_copies import make_folders, make_tfds

from data_tools.vtab.prepare import DATASETS, Ids
from data_tools.vtab.tasks import ORIGINS
from vitscale.cli.main import app
from vitscale.data.shards import Manifest
from vitscale.ground.errors import RecipeError

pytestmark = pytest.mark.usefixtures("here")


def call(*arguments: object):
    return CliRunner().invoke(app, ["vtab", *map(str, arguments)])


def test_the_command_takes_what_there_is_and_says_what_is_missing(tmp_path):
    make_tfds(tmp_path / "tfds", "camelyon", images={"train": 800, "validation": 200, "test": 4})
    out = tmp_path / "out"
    result = call("prepare", tmp_path / "tfds", "--out", out)
    assert result.exit_code == 0, result.output
    assert [Manifest.load(out / "camelyon" / name).num_samples for name in DATASETS] == [1000, 800, 200, 4]
    assert "missing: caltech101" in result.output and str(tmp_path / "tfds" / "kitti") in result.output
    assert ORIGINS["resisc45"].get in result.output
    assert call("prepare", tmp_path / "tfds", "--out", out, "--task", "camelyon").exit_code == 0
    assert call("prepare", tmp_path / "tfds", "--out", out, "--task", "camelyon", "--task", "dtd").exit_code == 3
    assert isinstance(call("prepare", tmp_path / "tfds", "--out", out, "--task", "mnist").exception, RecipeError)
    assert isinstance(call("prepare", tmp_path / "no", "--out", out).exception, RecipeError)
    pinned = call("prepare", tmp_path / "tfds", "--out", tmp_path / "b", "--ids", out, "--task", "camelyon")
    assert pinned.exit_code == 0, pinned.output
    both = [Ids.read(folder / "camelyon" / "ids.json") for folder in (out, tmp_path / "b")]
    assert both[0].parts == both[1].parts


def test_a_task_that_fails_does_not_stop_the_others(tmp_path):
    make_tfds(tmp_path / "tfds", "camelyon", images=20)
    make_folders(tmp_path / "tfds", "svhn", train=1000, test=20)
    result = call("prepare", tmp_path / "tfds", "--out", tmp_path / "out")
    assert result.exit_code == 3 and (tmp_path / "out" / "svhn" / "test" / "manifest.json").is_file()
    assert "failed: camelyon" in result.output
