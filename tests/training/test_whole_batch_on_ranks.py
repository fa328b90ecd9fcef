"""Comparing the whole global batch on worlds of 1, 2 and 4 in micro-batches of 1 to 8: one update, and two hundred."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import checkpoint
from ranks import job, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # 36 runs

KINDS = ("contrastive", "lejepa")
MESH = [(world, micro) for world in (1, 2, 4) for micro in (1, 2, 4, 8) if world * micro <= 8]
WITHIN = {1: 1e-6, 200: 1e-5}  # by updates


def name_of(kind: str, world: int, micro: int, updates: int) -> str:
    return f"{kind}-{world}-{micro}-{updates}"


def blocks(kind: str, world: int, micro: int, updates: int) -> dict[str, Any]:
    directions = {"directions": 16} if kind == "lejepa" else {}
    return {
        "precision": "fp32",
        "model": {"drop_path": 0.2, "drop_path_rule": "uniform", "depth": 1},
        "data": {"views": [{"name": "global", "count": 2}, {"name": "local", "size": 16}]},
        "batch": {"global": 8, "micro_max": micro},
        "objective": {"kind": kind, "hidden": 16, "outputs": 8} | directions,
        "optimizer": {"name": "sgd", "lr": 0.03, "momentum": 0.9},
        "schedule": {"duration": {"steps": updates}, "warmup": {"steps": 0}},
        "parallelism": {"zero_stage": 1 if micro > 1 else 3},
        "evaluation": {"validation": None},
        "logging": {"every": 50, "batch_digest": False},
    }


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    for ranks in (1, 2, 4):
        cases = [(kind, *each, updates) for kind in KINDS for each in MESH if each[0] == ranks for updates in WITHIN]
        launch(root, [job(name_of(*case), blocks(*case)) for case in cases], ranks)
    return root


@pytest.mark.parametrize("updates", WITHIN)
@pytest.mark.parametrize(("world", "micro"), MESH)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_rank(root, kind, world, micro, updates):
    """SGD keeps differences as they are; AdamW divides by roots of squares that may be tiny."""
    found, expected = (checkpoint(root, name_of(kind, *each, updates), updates) for each in ((world, micro), (1, 8)))
    for name in expected.index.shapes:
        values, others = found.parameter(name), expected.parameter(name)
        assert float((values - others).norm()) <= WITHIN[updates] * float(others.norm()) + 1e-7, name
    if (world, micro) == (1, 8):
        begun = checkpoint(root, name_of(kind, 1, 8, 1), 1).parameter("embedding.weight")
        assert updates == 1 or not torch.allclose(begun, expected.parameter("embedding.weight"), rtol=1e-3)
