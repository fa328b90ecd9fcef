"""`parallelism.hpz_size` on four real ranks, as two nodes of two: to the last bit what ZeRO 3 computes without it.

The copies within nodes must be forgotten whenever weights change: after updates, when a checkpoint is loaded, and when
an evaluation puts the average in the place of the weights and back.
"""

from pathlib import Path
from typing import Any

import pytest
from outcomes import checkpoint, column, equal, evaluations
from ranks import STEPS, asked, job, launch, quick_of

from vitscale.ground.errors import RecipeError
from vitscale.recipe import load_recipe
from vitscale.training.deepspeed.config import derive_config

FROZEN = r"^(embedding|cls|pos|blocks\.[01]\.)"
RUNS: dict[str, dict[str, Any]] = {
    # Everything at once, for the fast tests.
    "frozen": {
        "optimizer": {"groups": [{"match": FROZEN, "frozen": True}]},
        "ema": {"decay": 0.9},
        "model": {"dropout": 0.2},
    },
    "fp32": {"precision": "fp32"},
    "recomputed": {"parallelism": {"activation_checkpointing": 2}, "ema": {"decay": 0.9}},
    "overlap": {"parallelism": {"overlap": True}},
    "muon": {"optimizer": {"name": "muon", "lr": 3e-3, "clip_norm": 1.0}},
}
FAST = "frozen"


def blocks(name: str, hpz_size: int) -> dict[str, Any]:
    parallelism = {"zero_stage": 3, "hpz_size": hpz_size, **RUNS[name].get("parallelism", {})}
    return {
        "batch": {"global": 16, "micro_max": 2},
        "evaluation": {"validation": "test", "batch": 5, "every": {"steps": 2}},
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 100}},
        **RUNS[name],
        "parallelism": parallelism,
    }


@pytest.fixture(scope="module")
def root(root: Path, request: pytest.FixtureRequest) -> Path:
    jobs: list[dict[str, Any]] = []
    for name in dict.fromkeys(params["name"] for params in asked(request) if "name" in params):
        jobs += [
            job(name, blocks(name, 2)),
            job(f"{name}-without", blocks(name, 1)),
            job(f"{name}-begun-without", [blocks(name, 1), blocks(name, 2), blocks(name, 2)], 2, 4, None),
            job(f"{name}-elastic", blocks(name, 2), 3),
        ]
    launch(root, jobs, 4)
    launch(root, [{**each, "stops": [None]} for each in jobs if each["name"].endswith("-elastic")], 2)
    return root


NAMES = quick_of(RUNS, [FAST])


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_is_that_of_zero_3_without_it(root, name):
    assert column(root, name, "step") == list(range(1, STEPS + 1))
    for other in (f"{name}-without", f"{name}-begun-without"):
        for key in ("loss", "grad_norm", "batch_digest"):
            assert column(root, name, key) == column(root, other, key), other
        assert equal(checkpoint(root, name), checkpoint(root, other)), other
    assert evaluated(root, name) == evaluated(root, f"{name}-without")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_on_one_node(root, name):
    assert set(column(root, f"{name}-elastic", "world_size")) == {4, 2}
    if "dropout" not in RUNS[name].get("model", {}):
        assert column(root, f"{name}-elastic", "loss") == pytest.approx(column(root, name, "loss"), rel=1e-2)
    assert len(column(root, f"{name}-elastic", "loss")) == STEPS


def evaluated(root: Path, name: str) -> list[tuple[float, float]]:
    return [(each["eval/validation/loss"], each["eval/validation/top1"]) for each in evaluations(root, name)]


@pytest.mark.parametrize("others", ["zero_stage: 2", "zero_stage: 3, offload: optimizer"])
def test_where_there_is_nothing_to_copy_the_recipe_is_refused(others):
    with pytest.raises(RecipeError):
        load_recipe("b16_i1k", [f"parallelism={{{others}, hpz_size: 8}}"])


def test_nodes_must_be_whole_and_one_alone_needs_no_copy():
    recipe = load_recipe("b16_i1k", ["parallelism={zero_stage: 3, hpz_size: 8}", "batch.global=4608"])
    with pytest.raises(RecipeError, match="hpz_size"):
        derive_config(recipe, 12)
    sizes = [derive_config(recipe, ranks)["zero_optimization"]["zero_hpz_partition_size"] for ranks in (4, 8, 16)]
    assert sizes == [1, 1, 8]


def test_deepspeed_s_own_key_is_refused():
    block = "deepspeed={zero_optimization: {zero_hpz_partition_size: 8}}"
    with pytest.raises(RecipeError, match="zero_hpz_partition_size"):
        derive_config(load_recipe("b16_i1k", ["parallelism.zero_stage=3", block]), 16)
