"""Where a path leads that a run was given in another folder, or before things were moved."""

from pathlib import Path

import pytest

from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint_index import CheckpointIndex, data_root, find_path


def index_of(began_in: str | None) -> CheckpointIndex:
    data = {} if began_in is None else {"working_directory": began_in}
    return CheckpointIndex(
        step=1, world_size=1, shapes={}, kinds=[], optimizer_steps=1, recipe={}, data=data, versions={"vitscale": "0"}
    )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a run began in, the one where somebody stands, and the one where the run is now."""
    for name in ("then", "here", "moved"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (("then", "here", "moved"), "then/runs/trunk"),
        (("here", "moved"), "runs/trunk"),  # relative to here, as it was given
        (("moved",), "moved/trunk"),
        ((), "runs/trunk"),
    ],
)
def test_first_where_the_run_began_then_here_then_beside_the_run(folders, there, expected):
    for place in there:
        (folders / place / ("trunk" if place == "moved" else "runs/trunk")).mkdir(parents=True)
    found = find_path("runs/trunk", index_of(str(folders / "then")), folders / "moved" / "branch")
    assert found == (Path(expected) if expected == "runs/trunk" else folders / expected)


def test_what_no_folder_changes(folders):
    (folders / "here" / "data").mkdir()
    absolute = str(folders / "nowhere")
    assert find_path(absolute, index_of(str(folders / "then"))) == Path(absolute)
    for index in (None, index_of(None)):
        assert find_path("data", index) == Path("data")
    assert find_path("~/data", None) == Path.home() / "data"
    assert find_path("x" * 5000, index_of(str(folders))) == Path("x" * 5000)


def test_a_root_that_is_a_url_or_none_stays(folders):
    index = index_of(str(folders / "then"))
    for settings, expected in ((["data.root=s3://bucket/data"], "s3://bucket/data"), ([], None)):
        assert data_root(load_recipe("b16_i1k", settings), index) == expected
    (folders / "then" / "data").mkdir()
    assert data_root(load_recipe("b16_i1k", ["data.root=data"]), index) == str(folders / "then" / "data")
