"""Training with products in float8 on two real DeepSpeed ranks: near bf16's losses, and as exact a resume."""

from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_same_run, column
from ranks import launch, make_data

pytest.importorskip("torchao")

BLOCKS: dict[str, Any] = {"parallelism": {"zero_stage": 2}, "model": {"dropout": 0.1}, "batch": {"micro_max": 4}}
RUNS: dict[str, tuple[list[int | None], dict[str, Any]]] = {
    "bf16": ([None], BLOCKS),
    "fp8": ([None], {**BLOCKS, "precision": "fp8"}),
    "resumed": ([3, None], {**BLOCKS, "precision": "fp8"}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("float8")
    make_data(root)
    jobs = [{"name": name, "stops": stops, "blocks": [blocks] * len(stops)} for name, (stops, blocks) in RUNS.items()]
    launch(root, jobs, 2)
    return root


def test_losses_are_near_those_of_bf16_and_not_the_same(root):
    ours, other = column(root, "fp8", "loss"), column(root, "bf16", "loss")
    assert ours == pytest.approx(other, rel=0.02)
    assert ours[1:] != other[1:]
    assert column(root, "fp8", "batch_digest") == column(root, "bf16", "batch_digest")


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(root):
    assert_same_run(root, "resumed", "fp8")
