"""What runs on two real DeepSpeed ranks: many trainings in one launch, their outcome left in files.

One launch costs seconds, one more engine in it a fraction of a second.
"""

import json
import traceback
from pathlib import Path
from typing import Any

import torch

from vitscale.errors import VitscaleError
from vitscale.recipe import Recipe, load_recipe, smoke_form, validate_recipe
from vitscale.shards.generated import write_generated_dataset

STEPS = 6
SHARDS = [24, 24, 24, 24, 9]

BASE: dict[str, Any] = {
    "model": {"patch_size": 8, "width": 32, "depth": 3, "mlp_dim": 48, "num_heads": 2},
    "data": {"train": "train", "image_size": 32},
    "batch": {"global": 16, "micro_max": 8},
    "objective": {"loss": "sigmoid"},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip_norm": 1.0},
    "schedule": {"duration": {"steps": STEPS}, "warmup": {"steps": 2}},
    "logging": {"every": 1, "tensorboard": False, "batch_digest": True},
    "evaluation": {"validation": "test", "batch": 5},
}


def make_recipe(root: Path, **blocks: Any) -> Recipe:
    """The toy recipe with some fields replaced, block by block."""
    content = dict(BASE)
    for key, value in blocks.items():
        both = isinstance(value, dict) and isinstance(content.get(key), dict) and "name" not in value
        content[key] = {**content[key], **value} if both else value
    content["data"] = {**content["data"], "root": str(root)}
    return validate_recipe(content, "test")


def make_data(root: Path) -> None:
    """The toy datasets `train` and `test` under `root`."""
    write_generated_dataset(root / "train", SHARDS, seed=1)
    write_generated_dataset(root / "test", [13, 10], seed=2)


def train(recipe: Recipe, run_dir: Path, world: Any, stop_at: int | None = None) -> None:
    """One process's worth of training, and the engine freed."""
    from vitscale.training.plan import plan_run
    from vitscale.training.trainer import Trainer

    trainer = Trainer(recipe, plan_run(recipe, world.rank, world.size), run_dir, world)
    try:
        trainer.run(stop_at)
    finally:
        trainer.engine.destroy()


def join(rank: int, world_size: int, port: int) -> Any:
    """The process group, as a launcher would have it."""
    import os

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from vitscale.training import distributed

    return distributed.start(rank, world_size, rank)


def run_smoke_forms(rank: int, world_size: int, port: int, root: Path, stems: list[str]) -> None:
    """Entry point of a rank: two steps of the smoke form of each recipe."""
    world = join(rank, world_size, port)
    for stem in stems:
        train(smoke_form(load_recipe(stem), root, world_size), root / "runs" / stem, world, stop_at=2)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_jobs(rank: int, world_size: int, port: int, root: Path, jobs: list[dict[str, Any]]) -> None:
    """Entry point of a rank: each job is {name, stops, blocks} and, to go on from another one's run, its `directory`.

    `stops` are the steps at which its parts end, None for the end of the run; `blocks` are the recipes of the parts. An
    error of ours ends a job and is written to `<name>.error`.
    """
    world = join(rank, world_size, port)
    for job in jobs:
        run_dir = root / "runs" / job.get("directory", job["name"])
        try:
            for stop_at, blocks in zip(job["stops"], job["blocks"], strict=True):
                train(make_recipe(root, **blocks), run_dir, world, stop_at)
        except VitscaleError as error:
            if rank == 0:
                message = {"kind": type(error).__name__, "message": str(error)}
                (root / "runs" / f"{job['name']}.error").write_text(json.dumps(message))
        except Exception:
            (root / "runs" / f"{job['name']}.crash-{rank}").write_text(traceback.format_exc())
            raise
    if rank == 0:
        (root / "runs" / f"world-{world_size}.json").write_text(json.dumps(_set_up_of_the_process()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _set_up_of_the_process() -> dict[str, Any]:
    """What only the process itself can tell: the time-out of each of its groups, operators that would be compiled."""
    import deepspeed
    from torch.distributed import distributed_c10d

    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return {
        "timeouts": [backend.options._timeout.total_seconds() for backend in backends],
        "shm_op": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
    }
