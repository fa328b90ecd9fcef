"""Training with compiled blocks on two real DeepSpeed ranks: the losses of eager ones, and as exact a resume."""

from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_same_run, column, evaluations
from ranks import job, launch

pytestmark = pytest.mark.slow  # compiling takes a minute or two

RUNS = {
    **{f"zero{stage}": {"parallelism": {"zero_stage": stage}} for stage in range(3)},
    "overlap": {"parallelism": {"zero_stage": 1, "overlap": True}},
    "recomputed": {"parallelism": {"zero_stage": 1, "activation_checkpointing": 1}},
    "float8": {"parallelism": {"zero_stage": 1}, "precision": "fp8"},
    "float8-recomputed": {"parallelism": {"zero_stage": 0, "activation_checkpointing": 1}, "precision": "fp8"},
    # Units of several shapes share their code.
    "hybrid": {"parallelism": {"zero_stage": 1}, "model": {"blocks": [1, 1], "patch_size": 2}},
}


def blocks(name: str, is_compiled: bool) -> dict[str, Any]:
    parallelism = {**RUNS[name]["parallelism"], "compile": is_compiled}
    evaluation = {"validation": "test", "batch": 5, "every": {"steps": 2}}
    return {"precision": "fp32", "evaluation": evaluation, **RUNS[name], "parallelism": parallelism}


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    jobs = [job(f"{name}-eager", blocks(name, False)) for name in RUNS]
    jobs += [job(name, blocks(name, True)) for name in RUNS]
    dropout = {**blocks("zero1", True), "model": {"dropout": 0.2}}
    launch(root, [*jobs, job("dropout", dropout), job("dropout-resumed", dropout, 3, None)], 2)
    return root


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_eager_blocks(root, name):
    within = 0.05 if name.startswith("float8") else 1e-4  # a last bit decides which of sixteen numbers is nearest
    for key in ("loss", "grad_norm"):
        assert column(root, name, key) == pytest.approx(column(root, f"{name}-eager", key), rel=within)
    assert column(root, name, "batch_digest") == column(root, f"{name}-eager", "batch_digest")
    last, expected = (evaluations(root, run)[-1]["eval/validation/loss"] for run in (name, f"{name}-eager"))
    assert last == pytest.approx(expected, rel=within)


def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(root):
    assert_same_run(root, "dropout-resumed", "dropout")
