"""What runs on real DeepSpeed ranks: many trainings, one after another, their outcome left in files.

One or two ranks are started once and serve all tests of a process that need so many.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks, run_once

from vitscale.data.batch import Batch
from vitscale.data.image_operations import TrainingInput
from vitscale.data.loader import training_loader, training_order
from vitscale.data.shards import Manifest
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import VitscaleError
from vitscale.ground.machine import free_port
from vitscale.models import initial_value
from vitscale.objectives import Objective, build_objective
from vitscale.recipe import Recipe, load_recipe, smoke_form, validate_recipe
from vitscale.runs.checkpoint import CheckpointStore

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


def begun(recipe: Recipe, num_classes: int = 7) -> Objective:
    """The objective with the weights that a run of the recipe begins with."""
    objective = build_objective(recipe, num_classes)
    with torch.no_grad():
        for name, parameter in objective.named_weights():
            parameter.copy_(initial_value(objective, name, parameter.shape, recipe.seed))
    return objective


def initial_weights(recipe: Recipe, num_classes: int = 7) -> dict[str, torch.Tensor]:
    """Those weights by name."""
    return {name: parameter.detach() for name, parameter in begun(recipe, num_classes).named_weights()}


def batches(recipe: Recipe, steps: int) -> Iterator[tuple[Batch, tuple[torch.Tensor, ...]]]:
    """The first batches of a run on one rank, with what the model sees in fp32: (B, n, S, S, 3) a kind of view."""
    manifest, to_input = Manifest.load(recipe.dataset_path(recipe.data.train)), TrainingInput(recipe)
    order = training_order(recipe, manifest)
    with training_loader(recipe, manifest, order, rank=0, world=1, start=0, stop=steps, digest=False) as loader:
        for batch in loader:
            yield batch, to_input.of_views(batch.views, batch.view_keys, torch.device("cpu"), torch.float32)


Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Makes something go wrong in the trainer that it is given; see faults.py."""


def train(
    recipe: Recipe, run_dir: Path, world: Any, stop_at: int | None = None, faults: tuple[Fault, ...] | list[Fault] = ()
) -> None:
    """One process's worth of training, and what it holds freed."""
    from vitscale.training.beginning.run_plan import plan_run
    from vitscale.training.loop.trainer import Trainer

    with groups_ended():
        trainer = Trainer(plan_run(recipe, world.rank, world.size), run_dir, world)
        try:
            with contextlib.ExitStack() as stack:
                for fault in faults:
                    stack.enter_context(fault(trainer))
                trainer.run(stop_at)
        finally:
            trainer.learner.engine.deepspeed.destroy()
            trainer.claim.close()  # as the end of the process would


@contextlib.contextmanager
def groups_ended() -> Iterator[None]:
    """The process groups that vitscale makes in here end with it, as with the process.

    Each has threads that look around a hundred times a second: those of some dozen runs are busier than a small run.
    """
    made: list[Any] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        group = new_group(*arguments, **named)
        made.extend([group] if "backend" in named else [])  # DeepSpeed's, which it keeps, do not name theirs
        return group

    new_group, error = torch.distributed.new_group, None
    torch.distributed.new_group = noted
    try:
        yield
    except VitscaleError as raised:  # on all ranks; after any other error they are ended
        error = raised
    finally:
        torch.distributed.new_group = new_group
    torch.distributed.barrier()
    for group in made:
        torch.distributed.destroy_process_group(group)
    if error is not None:
        raise error


def join(rank: int, world_size: int, port: int) -> Any:
    """The process group, as a launcher would have it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        VITSCALE_EXTENSIONS="transformers averaged_target",  # a tokenizer of the one, an objective in the other
    )
    from vitscale.training.deepspeed import distributed

    world = distributed.start(rank, world_size, rank)
    torch.set_num_threads(1)  # several for tensors this small only wait for each other
    _count_tensors_once()
    return world


def _count_tensors_once() -> None:
    """Have the pre-flight count the tensors of a step once for each model, which takes a quarter of a small run."""
    from vitscale.training.beginning import memory

    count, known = memory.step_tensors, {}

    def counted(recipe: Recipe, *others: Any) -> Any:
        of_tensors = recipe.model, recipe.objective, recipe.data.image_size, recipe.precision
        key = (*map(str, of_tensors), recipe.parallelism.activation_checkpointing, *others)
        if key not in known:
            known[key] = count(recipe, *others)
        return known[key]

    memory.step_tensors = counted


def asked(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The parameters of the tests of a module that are going to run."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def quick_of(cases: Iterable[str], quick: Collection[str]) -> list[Any]:
    """All cases as parameters, those that are not quick marked as slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def job(name: str, blocks: dict[str, Any] | list[dict[str, Any]], *stops: int | None, **others: Any) -> dict[str, Any]:
    """What `run_jobs` takes: a run whose parts end at these steps, by default one part to the end of the run.

    Its parts have the same recipe, or one each.
    """
    stops = stops or (None,)
    parts = blocks if isinstance(blocks, list) else [blocks] * len(stops)
    return {"name": name, "stops": stops, "blocks": parts, **others}


def launch(root: Path, jobs: list[dict[str, Any]], world_size: int) -> None:
    """`run_jobs` on so many ranks."""
    if jobs:
        (root / "runs").mkdir(exist_ok=True)
        on_ranks(world_size, run_jobs, root, jobs)


_WORLDS: dict[int, tuple[Ranks, int]] = {}
_MOST_CALLS = 10  # hundreds of runs leave gigabytes and a share of a core behind; new ranks take a second


def on_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> None:
    """Have the ranks of a world call `work(world, *arguments)`. An error on one of them is raised and ends them.

    Up to two stay for the next call; more are seldom needed and take memory.
    """
    ranks, calls = _WORLDS.pop(world_size, None) or (Ranks(world_size, join, int(free_port())), 0)
    ranks.do(work, *arguments)
    if world_size <= 2 and calls < _MOST_CALLS:
        _WORLDS[world_size] = ranks, calls + 1
    else:
        ranks.close()


def start(entry: Callable[..., None], root: Path, work: Any, world_size: int) -> None:
    """An entry point (rank, world_size, port, root, work) in processes of their own, for what changes or ends these."""
    run_once(entry, (world_size, int(free_port()), root, work), world_size, "forkserver")


def run_smoke_forms(world: Any, root: Path, stems: list[str]) -> None:
    """Two steps of the smoke form of each recipe."""
    from vitscale.training.beginning.automatic import settle

    for stem in stems:
        run_dir = root / "runs" / stem
        recipe, _ = settle(smoke_form(load_recipe(stem), root, world.size), run_dir, world.rank, world.size)
        train(recipe, run_dir, world, stop_at=2)


def run_jobs(world: Any, root: Path, jobs: list[dict[str, Any]]) -> None:
    """Each job is a run, by these keys:

        name: of what it leaves in `runs`, and of its directory there, unless `directory` says another run's
        begins_as: the run whose directory is copied first
        stops: the steps at which the parts of the run end, None for the end of the run
        blocks: the recipes of the parts
        faults: what goes wrong in every part

    An error of ours ends a job and is written to `<name>.error`, with the steps that are saved at that moment. What is
    printed goes to `<name>.out`.
    """
    for job in jobs:
        name, run_dir = job["name"], root / "runs" / job.get("directory", job["name"])
        if world.is_main and "begins_as" in job:
            shutil.copytree(root / "runs" / job["begins_as"], run_dir)
        torch.distributed.barrier()
        with _printed_to(root / "runs" / f"{name}.out" if world.is_main else None):
            try:
                for stop_at, blocks in zip(job["stops"], job["blocks"], strict=True):
                    train(make_recipe(root, **blocks), run_dir, world, stop_at, job.get("faults", []))
            except VitscaleError as error:
                if world.is_main:
                    saved = CheckpointStore(run_dir / "checkpoints").steps()
                    message = {"kind": type(error).__name__, "code": error.exit_code, "message": str(error)}
                    (root / "runs" / f"{name}.error").write_text(json.dumps({**message, "saved": saved}))


@contextlib.contextmanager
def _printed_to(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield
