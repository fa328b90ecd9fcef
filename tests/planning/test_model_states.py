"""Weights, gradients and optimizer state by formula, against what the engines of two real ranks hold."""

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_engines import build, join
from toy_recipes import make_recipe
from training.ranks import start

from vitscale.models import weight_dtype
from vitscale.training.beginning.memory import expected_memory

WORLD = 2
# Small buckets: what is in flight is no part of what is compared.
ZERO = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
ZERO3 = ZERO | {"stage3_param_persistence_threshold": 5000, "stage3_prefetch_bucket_size": 0}
ZERO3 |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def case(stage: int, precision: str, accumulation: int, **parallelism: Any) -> dict[str, Any]:
    return {
        "model": {"patch_size": 8, "width": 64, "depth": 4, "mlp_dim": 256, "num_heads": 2},
        "image_size": 16,
        "precision": precision,
        "batch": {"global": WORLD * accumulation, "micro_max": 1},
        "parallelism": {"zero_stage": stage, **parallelism},
        "deepspeed": {"zero_optimization": ZERO3 if stage == 3 else ZERO},
    }


KINDS: dict[str, tuple[range, dict[str, Any]]] = {
    "none": (range(4), {}),
    "optimizer": (range(1, 4), {"offload": "optimizer"}),
    "overlap": (range(1, 3), {"overlap": True}),
}
CASES = {
    f"zero{stage}-{precision}-{accumulation}-{kind}": case(stage, precision, accumulation, **parallelism)
    for kind, (stages, parallelism) in KINDS.items()
    for stage in stages
    for precision in ("bf16", "fp32")
    for accumulation in (1, 2)
}
CASES["sgd"] = case(1, "bf16", 1) | {"optimizer": {"name": "sgd", "lr": 0.1}}
CASES["bf16-sgd"] = case(1, "bf16", 1) | {"optimizer": {"name": "sgd", "lr": 0.1, "momentum_dtype": "bf16"}}
CASES["plain-sgd"] = case(2, "fp32", 1) | {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0}}
# Everything but the second half of the blocks and the head.
FROZEN = {"name": "adamw", "lr": 1e-3, "groups": [{"match": r"^(embedding|cls|pos|blocks\.[01]\.)", "frozen": True}]}
CASES |= {
    f"zero{stage}-bf16-{accumulation}-frozen": case(stage, "bf16", accumulation) | {"optimizer": FROZEN}
    for stage in range(4)
    for accumulation in (1, 2)
}
QUICK = (
    *("zero0-bf16-2-none", "zero1-bf16-1-none", "zero2-fp32-2-none", "zero3-bf16-2-none", "zero2-bf16-1-optimizer"),
    *("zero1-bf16-1-frozen", "zero3-bf16-2-frozen", "bf16-sgd"),
    *("zero1-bf16-2-overlap", "zero2-bf16-2-overlap"),
)


def held() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process looks at, and of the gradients'."""
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return found


def run_engines(rank: int, world_size: int, port: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Entry point of a rank: two steps of each case's recipe, and what is held in the second one, to a file of rank 0.

    `backward`: after the last backward pass. `step`: after the update.
    """
    join(rank, world_size, port)
    gc.collect()
    gc.freeze()  # what is imported holds most objects of the process, and none of what is counted
    results = {}
    for name, blocks in cases.items():
        before = held()

        def new(before: dict[int, int] = before) -> int:
            sizes = [-1, 0]
            while sizes[-1] != sizes[-2]:  # gloo's threads let go of what they have summed a moment later
                time.sleep(0.1)
                sizes.append(sum(size for storage, size in held().items() if storage not in before))
            return sizes[-1]

        recipe = make_recipe(**blocks)
        engine = build(recipe, 10, world_size).deepspeed
        _, accumulation = recipe.batch.split(world_size)
        result = {}
        for _ in range(2):
            for _ in range(accumulation):
                size = recipe.data.image_size
                inputs = torch.zeros(1, size, size, 3, dtype=weight_dtype(recipe)), torch.zeros(1, dtype=torch.int64)
                engine.backward(engine(*inputs).per_sample.sum())
                del inputs
                result["backward"] = new()
                engine.step()
            result["step"] = new()
        results[name] = result
        engine.destroy()
        del engine
    if rank == 0:
        (folder / "held.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_a_copy_of_the_weights_within_nodes_is_held_from_the_forward_pass_to_the_update(tmp_path):
    batch = {"global": 4, "micro_max": 1}
    cases = {str(size): case(3, "bf16", 1, hpz_size=size) | {"batch": batch} for size in (1, 2)}
    start(run_engines, tmp_path, cases, 4)
    held = json.loads((tmp_path / "held.json").read_text())
    without, with_copy = (expected_memory(make_recipe(**cases[size]), 10, 4).weights for size in "12")
    copy = with_copy - without
    assert held["2"]["backward"] - held["1"]["backward"] == pytest.approx(copy, rel=0.05)
    assert abs(held["2"]["step"] - held["1"]["step"]) <= 0.05 * copy


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What the engines of the selected tests hold: one launch."""
    folder: Path = tmp_path_factory.mktemp("engines")
    selected = {item.name for item in request.session.items}
    cases = {name: blocks for name, blocks in CASES.items() if any(f"[{name}]" in item for item in selected)}
    start(run_engines, folder, cases, WORLD)
    return json.loads((folder / "held.json").read_text())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_states_are_what_an_engine_holds(name, measured):
    memory = expected_memory(make_recipe(**CASES[name]), 10, WORLD)
    offloaded = 0 if "frozen" in name else memory.host_optimizer  # values of frozen ones come with the first load
    always = memory.weights + memory.optimizer + offloaded
    if "zero1" in name and "2-optimizer" in name:
        # What is summed on the device goes to the host piece by piece.
        assert always * 0.95 <= measured[name]["backward"] <= (always + memory.accumulated) * 1.05
        return
    assert measured[name]["backward"] == pytest.approx(always + memory.gradients, rel=0.05), "after the backward pass"
    if "optimizer" not in name:
        kept = memory.gradients if "zero3" in name else memory.accumulated if "bf16-2" in name else 0
        kept = 0 if "zero2" in name or "overlap" in name else kept  # the others' sums are made once
        assert measured[name]["step"] == pytest.approx(always + kept, rel=0.05), "after the update"
