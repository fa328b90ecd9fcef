"""`vitscale evaluate` from another folder than the run began in finds its data, or says where it looked."""

import pytest
from finished_runs import evaluate_run
from models.weights.exported import TINY, described, finished_run, valued

from vitscale.data.shards.generated import CLASS_NAMES, write_generated_dataset
from vitscale.evaluation.finished import FinishedModel
from vitscale.ground.errors import DataError


def test_a_relative_root_is_the_run_s(tmp_path, monkeypatch):
    monkeypatch.delenv("VITSCALE_DATA_ROOT", raising=False)
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    write_generated_dataset(project / "DATA" / "test", [13], seed=1)
    elsewhere.mkdir()
    block = TINY | {"head": "linear"}
    settings = {"data": {"root": "DATA"}, "evaluation": {"validation": "test"}, "precision": "fp32"}
    run = finished_run(
        project / "run", valued(described(TINY, 64, len(CLASS_NAMES))), block, names=CLASS_NAMES, **settings
    )
    monkeypatch.chdir(project)
    there = evaluate_run(run)
    model = FinishedModel(run)  # as for --data: a name below data.root, or else a folder here
    assert model.dataset("DATA/test").sha256 == model.dataset("test").sha256
    with pytest.raises(DataError, match="DATA/DATA/absent"):
        model.dataset("DATA/absent")
    monkeypatch.chdir(elsewhere)
    assert evaluate_run(run) == there
    with pytest.raises(DataError, match=f"{elsewhere}/NONE/test"):
        evaluate_run(run, ["data.root=NONE"])
    (project / "DATA").rename(project / "moved")
    with pytest.raises(DataError, match=rf"{elsewhere}/DATA/test"):
        evaluate_run(run)
    assert evaluate_run(run, [f"data.root={project}/moved"]) == there
    (elsewhere / "DATA").symlink_to(project / "moved")
    assert evaluate_run(run) == there
