"""A run whose checkpoints lie in an object store goes on where its machine, and all that was on it, is gone."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import checkpoint, column, equal, error_of
from ranks import job, join, make_data, make_recipe, run_jobs, start
from s3_server import BUCKET, S3Server

from vitscale.data.shards.generated import CLASS_NAMES
from vitscale.runs.checkpoint import CheckpointReader, CheckpointStore, RemoteDirectory
from vitscale.training.beginning.initial_weights import check_initial_weights

REMOTE = {"every": {"steps": 1}, "dir": f"s3://{BUCKET}/checkpoints"}


def launch(root: Path, *jobs: dict[str, Any]) -> None:
    """In a process of its own, which knows nothing of the server but what is there, and how to find it."""
    (root / "runs").mkdir(exist_ok=True)
    start(run_with_environment, root, (dict(os.environ), jobs), 1)


def run_with_environment(rank: int, world_size: int, port: int, root: Path, work: tuple[dict[str, str], Any]) -> None:
    environment, jobs = work
    os.environ.update(environment)
    run_jobs(join(rank, world_size, port), root, jobs)


def remote(root: Path, name: str, step: int) -> CheckpointReader:
    return CheckpointStore(RemoteDirectory(f"{REMOTE['dir']}/{name}", root / "cache")).open(step)


def test_a_run_goes_on_without_its_directory(tmp_path: Path, s3: S3Server):
    make_data(tmp_path)
    blocks = {"ema": {"decay": 0.9}, "model": {"dropout": 0.1}}
    launch(tmp_path, job("here", blocks), job("there", blocks | {"checkpoint": REMOTE}, 4))
    shutil.rmtree(tmp_path / "runs" / "there")
    other = {**blocks, "optimizer": {"name": "sgd", "lr": 0.1}}
    launch(tmp_path, *(job("there", each | {"checkpoint": REMOTE}) for each in (blocks, other)))
    for key in ("loss", "lr", "grad_norm", "batch_digest"):
        assert column(tmp_path, "there", key) == column(tmp_path, "here", key)[4:], key
    assert not (tmp_path / "runs" / "there" / "checkpoints").exists()
    assert equal(checkpoint(tmp_path, "here"), remote(tmp_path, "there", 6))
    error = error_of(tmp_path, "there")
    assert error["kind"] == "RecipeError" and "optimizer.name" in error["message"]


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_one_whose_checkpoints_are_there(tmp_path: Path, s3: S3Server):
    make_data(tmp_path)
    init = {"from": str(tmp_path / "runs" / "source"), "head": "keep"}
    launch(tmp_path, job("source", {"ema": {"decay": 0.9}, "checkpoint": REMOTE}, 3), job("here", {"init": init}, 1))
    check_initial_weights(make_recipe(tmp_path, init=init), list(CLASS_NAMES), tmp_path / "runs" / "none")
    # The first update has learning rate 0.
    here, source = checkpoint(tmp_path, "here", 1), remote(tmp_path, "source", 3)
    for name in source.index.shapes:
        assert torch.equal(here.parameter(name), source.parameter(name, "ema")), name
