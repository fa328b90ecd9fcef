"""What runs on two real DeepSpeed ranks: many trainings in one launch, their outcome left in files.

What all ranks import is imported once: the processes are forked from one that has. A launch costs a second or two, one
more training in it a fraction of a second.
"""

import contextlib
import json
import multiprocessing
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import VitscaleError
from vitscale.ground.machine import free_port
from vitscale.recipe import Recipe, load_recipe, smoke_form, validate_recipe
from vitscale.runs.checkpoint import CheckpointStore

# The second is what the first expected memory of a process imports, with the fake tensors that it is counted by.
_IMPORTED_ONCE = ["vitscale.training.loop.trainer", "torch._dynamo"]

STEPS = 6
SHARDS = [24, 24, 24, 24, 9]

# As users train: bf16 with fp32 masters. So small that a processor without bf16 instructions hardly takes longer.
BASE: dict[str, Any] = {
    "precision": "bf16",
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
        both = isinstance(value, dict) and isinstance(content.get(key), dict) and not {"name", "kind"} & value.keys()
        content[key] = {**content[key], **value} if both else value
    content["data"] = {"root": str(root), **content["data"]}
    return validate_recipe(content, "test")


def make_data(root: Path) -> None:
    """The toy datasets `train` and `test` under `root`."""
    write_generated_dataset(root / "train", SHARDS, seed=1)
    write_generated_dataset(root / "test", [13, 10], seed=2)


Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Makes something go wrong in the trainer that it is given; see faults.py."""


def train(
    recipe: Recipe, run_dir: Path, world: Any, stop_at: int | None = None, faults: tuple[Fault, ...] | list[Fault] = ()
) -> None:
    """One process's worth of training, and what it holds freed."""
    from vitscale.training.beginning.run_plan import plan_run
    from vitscale.training.loop.trainer import Trainer

    trainer = Trainer(plan_run(recipe, world.rank, world.size), run_dir, world)
    try:
        with contextlib.ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault(trainer))
            trainer.run(stop_at)
    finally:
        trainer.learner.engine.deepspeed.destroy()
        trainer.claim.close()  # as the end of the process would


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
    from vitscale.training.deepspeed import distributed

    world = distributed.start(rank, world_size, rank)
    torch.set_num_threads(1)  # several for tensors this small only wait for each other
    return world


def asked(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of the tests of a module that are going to run."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def launch(root: Path, jobs: list[dict[str, Any]], world_size: int) -> None:
    """`run_jobs` on so many ranks."""
    (root / "runs").mkdir(exist_ok=True)
    start(run_jobs, root, jobs, world_size)


def start(entry: Callable[..., None], root: Path, work: Any, world_size: int) -> None:
    """An entry point (rank, world_size, port, root, work) on so many ranks."""
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    start_processes(entry, (world_size, int(free_port()), root, work), nprocs=world_size, start_method="forkserver")


def run_smoke_forms(rank: int, world_size: int, port: int, root: Path, stems: list[str]) -> None:
    """Entry point of a rank: two steps of the smoke form of each recipe."""
    from vitscale.training.beginning.automatic import settle

    world = join(rank, world_size, port)
    for stem in stems:
        run_dir = root / "runs" / stem
        recipe, _ = settle(smoke_form(load_recipe(stem), root, world_size), run_dir, rank, world_size)
        train(recipe, run_dir, world, stop_at=2)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_jobs(rank: int, world_size: int, port: int, root: Path, jobs: list[dict[str, Any]]) -> None:
    """Entry point of a rank. Each job is a run, by these keys:

        name: of what it leaves in `runs`, and of its directory there, unless `directory` says another run's
        begins_as: the run whose directory is copied first
        stops: the steps at which the parts of the run end, None for the end of the run
        blocks: the recipes of the parts
        faults: what goes wrong in every part

    An error of ours ends a job and is written to `<name>.error`, with the steps that are saved at that moment. What is
    printed goes to `<name>.out`.
    """
    world = join(rank, world_size, port)
    for job in jobs:
        name, run_dir = job["name"], root / "runs" / job.get("directory", job["name"])
        if rank == 0 and "begins_as" in job:
            shutil.copytree(root / "runs" / job["begins_as"], run_dir)
        torch.distributed.barrier()
        with _printed_to(root / "runs" / f"{name}.out" if rank == 0 else None):
            try:
                for stop_at, blocks in zip(job["stops"], job["blocks"], strict=True):
                    train(make_recipe(root, **blocks), run_dir, world, stop_at, job.get("faults", []))
            except VitscaleError as error:
                if rank == 0:
                    saved = CheckpointStore(run_dir / "checkpoints").steps()
                    message = {"kind": type(error).__name__, "code": error.exit_code, "message": str(error)}
                    (root / "runs" / f"{name}.error").write_text(json.dumps({**message, "saved": saved}))
            except Exception:
                (root / "runs" / f"{name}.crash-{rank}").write_text(traceback.format_exc())
                raise
    if rank == 0:
        (root / "runs" / f"world-{world_size}.json").write_text(json.dumps(_set_up_of_the_process()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _printed_to(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _set_up_of_the_process() -> dict[str, Any]:
    """What only the process itself can tell: the time-out of each of its groups, operators that would be compiled."""
    import deepspeed
    from torch.distributed import distributed_c10d

    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return {
        "timeouts": [backend.options._timeout.total_seconds() for backend in backends],
        "shm_op": deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"],
    }
