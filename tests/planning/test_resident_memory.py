"""The whole estimate against the resident memory of processes that train."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_engines import join
from rank_processes import run_once
from toy_recipes import make_recipe

from vitscale.ground.machine import free_port
from vitscale.training.beginning.memory import expected_memory

STEPS = 2  # the second has the gradients beside the optimizer's state


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def train(rank: int, world_size: int, port: int, folder: Path, blocks: dict[str, Any]) -> None:
    """Entry point of a rank: some steps of DeepSpeed; what its memory grew by at most since the imports, to a file."""
    import torch

    from vitscale.models import initialise, weight_dtype
    from vitscale.objectives import build_objective
    from vitscale.training.deepspeed.config import derive_config
    from vitscale.training.deepspeed.engine import Engine

    join(rank, world_size, port)
    before = status("VmRSS")
    recipe = make_recipe(**blocks)
    dtype = weight_dtype(recipe)
    objective = build_objective(recipe, 10).to(dtype)  # before it has values: there is never an fp32 one in memory
    initialise(objective.backbone, seed=0)
    engine = Engine(recipe, objective, derive_config(recipe, world_size)).deepspeed
    micro, accumulation = recipe.batch.split(world_size)
    size = recipe.data.image_size
    for _ in range(STEPS * accumulation):
        images, labels = torch.zeros(micro, size, size, 3, dtype=dtype), torch.zeros(micro, dtype=torch.int64)
        engine.backward(engine(images, labels).per_sample.sum())
        engine.step()
    (folder / f"{rank}").write_text(str(status("VmHWM") - before))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def check(folder: Path, blocks: dict[str, Any], world_size: int) -> None:
    run_once(train, (world_size, int(free_port()), folder, blocks), world_size)
    memory = expected_memory(make_recipe(**blocks), 10, world_size)
    # Nothing is loaded or saved here.
    expected = memory.device_bytes - memory.host_loader - memory.host_checkpoint
    for rank in range(world_size):
        grown = int((folder / f"{rank}").read_text())
        print(f"{blocks} on {world_size}: rank {rank} {grown / 2**20:,.0f} MiB, expected {expected / 2**20:,.0f} MiB")
        assert grown == pytest.approx(expected, rel=0.2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "blocks",
    [
        {"precision": "fp32", "micro_batch": 4},
        {"precision": "bf16", "micro_batch": 2, "image_size": 32},  # states alone: many processors emulate the products
    ],
    ids=["fp32", "bf16-states"],
)
def test_a_small_model_takes_what_is_expected(tmp_path, blocks):
    check(tmp_path, {"model": {"name": "ViT-B/16", "depth": 4}, **blocks}, 1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "blocks",
    [
        {},
        {"micro_batch": 16},
        {"parallelism": {"activation_checkpointing": 1}},
        {"parallelism": {"zero_stage": 2}, "precision": "fp32", "micro_batch": 4},
        {"batch": {"global": 16, "micro_max": 4}},
    ],
    ids=["micro8", "micro16", "recomputed", "zero2-fp32", "accumulated"],
)
def test_blocks_of_b16_take_what_is_expected(tmp_path, blocks, world_size):
    # Fewer blocks than a whole B/16: in emulated bf16 all twelve take ten minutes.
    blocks = {"model": {"name": "ViT-B/16", "depth": 3}, "micro_batch": 8} | blocks
    if "batch" not in blocks:
        micro = blocks["micro_batch"]
        blocks["batch"] = {"global": micro * world_size, "micro_max": micro}
    check(tmp_path, blocks, world_size)
