"""A run whose checkpoints lie in an object store goes on where its machine, and all that was on it, is gone."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import job, join, make_data, make_recipe, run_jobs, start
from s3_server import BUCKET, S3Server

from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.runs.checkpoint import CheckpointStore, RemoteDirectory
from vitscale.training.beginning.initial_weights import check_initial_weights

COLUMNS = ("loss", "lr", "grad_norm", "batch_digest")


def launch(root: Path, *jobs: dict[str, Any]) -> None:
    """In a process of its own, which knows nothing of the server but what is there, and how to find it."""
    start(run_with_environment, root, (dict(os.environ), jobs), 1)


def run_with_environment(rank: int, world_size: int, port: int, root: Path, work: tuple[dict[str, str], Any]) -> None:
    environment, jobs = work
    os.environ.update(environment)
    run_jobs(join(rank, world_size, port), root, jobs)


def rows(root: Path, name: str) -> list[list[Any]]:
    lines = map(json.loads, (root / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [[line[key] for key in COLUMNS] for line in lines if "loss" in line]


def test_a_run_goes_on_without_its_directory(tmp_path: Path, s3: S3Server):
    make_data(tmp_path)
    (tmp_path / "runs").mkdir()
    blocks = {"ema": {"decay": 0.9}, "model": {"dropout": 0.1}}
    remote = {"every": {"steps": 1}, "dir": f"s3://{BUCKET}/checkpoints"}
    launch(tmp_path, job("here", blocks), job("there", blocks | {"checkpoint": remote}, 4))
    shutil.rmtree(tmp_path / "runs" / "there")
    other = {**blocks, "optimizer": {"name": "sgd", "lr": 0.1}}
    launch(tmp_path, *(job("there", each | {"checkpoint": remote}) for each in (blocks, other)))
    assert rows(tmp_path, "there") == rows(tmp_path, "here")[4:]
    assert not (tmp_path / "runs" / "there" / "checkpoints").exists()
    here = CheckpointStore(tmp_path / "runs" / "here" / "checkpoints").open(6)
    there = CheckpointStore(RemoteDirectory(f"{remote['dir']}/there", tmp_path / "cache")).open(6)
    for kind in here.index.kinds:
        for name in here.index.shapes:
            assert torch.equal(here.parameter(name, kind), there.parameter(name, kind))
    error = json.loads((tmp_path / "runs" / "there.error").read_text())
    assert error["kind"] == "RecipeError" and "optimizer.name" in error["message"]


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_one_whose_checkpoints_are_there(tmp_path: Path, s3: S3Server):
    make_data(tmp_path)
    (tmp_path / "runs").mkdir()
    remote = {"every": {"steps": 1}, "dir": f"s3://{BUCKET}/begun"}
    init = {"from": str(tmp_path / "runs" / "there"), "head": "keep"}
    there = {"ema": {"decay": 0.9}, "checkpoint": remote}
    launch(tmp_path, job("there", there, 3), job("here", {"init": init}, 1))
    check_initial_weights(make_recipe(tmp_path, init=init), list(CLASS_NAMES), tmp_path / "runs" / "none")
    # The first update has learning rate 0.
    here = CheckpointStore(tmp_path / "runs" / "here" / "checkpoints").open(1)
    there = CheckpointStore(RemoteDirectory(f"{remote['dir']}/there", tmp_path / "cache")).open(3)
    for name in there.index.shapes:
        assert torch.equal(here.parameter(name), there.parameter(name, "ema")), name
