"""Proves a recipe: its engine unchanged, around a small model of its family, on generated batches, against plain torch.

Ranks are started in a folder of their own (`rank.py`), and what they have found is read there.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitscale.data.batch import Batch
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import RecipeError, VitscaleError
from vitscale.ground.machine import count_devices, free_port
from vitscale.ground.wording import counted
from vitscale.launch import Supervisor, fitting
from vitscale.launch.ends import EXIT_PREEMPTED, cause
from vitscale.launch.nodes import Layout
from vitscale.launch.pretraining import rank_commands
from vitscale.objectives import build_objective
from vitscale.recipe import Recipe, load_recipe, smoke_form, validate_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.names import RECIPE_FILE
from vitscale.training.deepspeed.config import derive_config

PROOF_FILE = "proof.json"
_MOST_ON_CPUS = 2
_SAMPLES = 96
STEPS = 10
MOST_ACCUMULATED = 4  # the most micro-batches of an update: beyond the first sum, one is like the other
_MOST_ROWS = 2
_ALIGNED = 8  # DeepSpeed wants multiples of this many elements
_USUAL_CLASSES = 1000
_CELLS = 4  # along each side of a picture, each of one colour
_PERSISTENT, _USUAL_PERSISTENT = "stage3_param_persistence_threshold", 100_000  # the default is DeepSpeed's
_SIZES = {  # sizes in elements -> whether there has to be room for the largest parameter
    "reduce_bucket_size": True,
    "allgather_bucket_size": True,
    "stage3_prefetch_bucket_size": False,
    "stage3_max_live_parameters": True,
    "stage3_max_reuse_distance": True,
    "sub_group_size": False,
    _PERSISTENT: False,
}
_NOT_RANDOM = {"dropout": 0.0}


def prove_recipe(name: str, settings: Sequence[str], ranks: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Make ten updates of a recipe's small form and return what was found; see `vitscale.about.checks.rank`.

    `ranks` on this machine are by default one a CUDA device, or two on CPUs, as far as they divide the batch. `say` is
    called with what begins. Raises `RecipeError` for what cannot be proved this way, whatever error a rank ends with,
    and `KeyboardInterrupt` for Ctrl-C.
    """
    recipe = load_recipe(name, settings)
    room = count_devices() or min(_MOST_ON_CPUS, len(os.sched_getaffinity(0)))
    ranks = ranks or fitting([room], recipe.batch.global_size)[0]
    with tempfile.TemporaryDirectory(prefix="vitscale-prove-") as temporary:
        folder = Path(temporary)
        small = small_form(recipe, folder, ranks)
        write_generated_dataset(folder / small.data.train, [max(_SAMPLES, small.batch.global_size)])
        # Whole: ranks settle what it leaves to the device as its run does, and then make it small.
        (folder / RECIPE_FILE).write_text(dump_yaml(recipe.dump()))
        say(f"{STEPS} updates of {name} on {counted(ranks, 'rank')}")
        _launch(folder, ranks)
        found: dict[str, Any] = json.loads((folder / PROOF_FILE).read_text())
    micro, accumulation = recipe.split(ranks)
    return {"recipe": name, **found, "recipe_micro_batch": micro, "recipe_accumulation": accumulation}


def _launch(folder: Path, ranks: int) -> None:
    command = [sys.executable, "-P", "-m", "vitscale.about.checks.rank", str(folder)]
    with Supervisor() as supervisor:
        ends = supervisor.run(rank_commands(command, Layout(ranks, 0, ranks, "127.0.0.1", int(free_port()))))
    if supervisor.told == signal.SIGINT:
        raise KeyboardInterrupt  # nothing was saved: as of any other command
    end = cause(ends)
    if end is not None or supervisor.told is not None:
        why = "" if end is None else f": {end.describe().strip()}"
        raise VitscaleError(f"nothing was proved{why}").with_code(EXIT_PREEMPTED if end is None else end.code)


def small_form(recipe: Recipe, data_root: Path, ranks: int) -> Recipe:
    """The recipe with a small model, small images and micro-batches, and ten steps.

    Unchanged are the ZeRO stage and whatever else a `deepspeed` block says, precision, offload, compilation, what is
    recomputed, objective, optimizer, groups, clipping, kind of schedule, average, and whether micro-batches are
    accumulated. Sizes of buckets shrink with the model, so that it has several too. Dropout is off.

    Raises `RecipeError` if the recipe does not run on so many ranks, or its model draws other random numbers.
    """
    micro, accumulation = recipe.split(ranks)
    sizes = derive_config(recipe, ranks)["zero_optimization"]
    if recipe.precision == "fp8":
        raise RecipeError(
            "precision: fp8 has two or three bits behind the first: no tolerance that follows from them would tell a "
            "wrong gradient from a right one; prove it with --set precision=bf16"
        )
    content = smoke_form(recipe, data_root, ranks).dump()
    content["model"] |= {key: value for key, value in _NOT_RANDOM.items() if key in content["model"]}
    rows = max(min(micro, _MOST_ROWS), recipe.objective.together)
    content["batch"] = {"global": rows * min(accumulation, MOST_ACCUMULATED) * ranks, "micro_max": rows}
    content["data"] |= {"repeats": 1}
    content["schedule"] |= {"duration": {"steps": STEPS}}
    content |= {"evaluation": {}, "selection": None, "checkpoint": {}, "profile": {}}
    content["logging"] |= {"trackers": []}
    small = validate_recipe(content, "the small form")
    if small.model.draws:
        raise RecipeError(f"{recipe.model.title} draws random numbers while it trains, which no oracle can know")
    zero = recipe.deepspeed.get("zero_optimization", {}) | _shrunken(sizes, _elements(recipe), _elements(small))
    content["deepspeed"] = recipe.deepspeed | {"zero_optimization": zero}
    return validate_recipe(content, "the small form")


def _elements(recipe: Recipe) -> list[int]:
    with torch.device("meta"):
        objective = build_objective(recipe, recipe.model.num_classes or _USUAL_CLASSES)
    return [parameter.numel() for parameter in objective.parameters()]


def _shrunken(sizes: dict[str, Any], whole: Sequence[int], small: Sequence[int]) -> dict[str, int]:
    """Sizes of ZeRO's buckets in elements, scaled down with the model."""
    share = min(1.0, sum(small) / sum(whole))
    least = {True: max(small), False: 1}
    present = sizes | ({_PERSISTENT: sizes.get(_PERSISTENT, _USUAL_PERSISTENT)} if sizes["stage"] == 3 else {})
    return {
        key: -(-max(int(present[key] * share), least[holds_largest]) // _ALIGNED) * _ALIGNED
        for key, holds_largest in _SIZES.items()
        if key in present
    }


def make_batch(recipe: Recipe, num_classes: int, step: int) -> Batch:
    """The whole global batch of a step: noise around patches of colour, so that each picture has its own gradient.

    It is the same on every rank. If the recipe leaves damaged samples out, one sample does not count.
    """
    generator = torch.Generator().manual_seed(recipe.seed + step)
    rows, views = recipe.batch.global_size, []
    for view, side in recipe.data.training_views():
        cells = torch.randint(0, 200, (rows * view.count, 3, _CELLS, _CELLS), generator=generator).float()
        pictures = torch.nn.functional.interpolate(cells, size=side).permute(0, 2, 3, 1).to(torch.uint8)
        noise = torch.randint(0, 56, pictures.shape, generator=generator, dtype=torch.uint8)
        views.append((pictures + noise).unflatten(0, (rows, view.count)))
    labels = torch.randint(0, max(num_classes, 1), (rows,), generator=generator)
    keys = tuple(torch.randint(-(2**63), 2**63 - 1, each.shape[:2], generator=generator) for each in views)
    mask = torch.ones(rows, dtype=torch.bool)
    if recipe.data.bad_samples == "mask":
        mask[step % rows] = False
    return Batch(
        position=step,
        epoch=0,
        views=tuple(views),
        labels=labels,
        uids=torch.arange(rows) + step * rows,
        view_keys=keys,
        mask=mask,
        bad_samples=0,
        digest=None,
    )


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """One rank's part of a global batch."""
    rows = len(batch.labels) // ranks
    part = slice(rank * rows, (rank + 1) * rows)
    columns = {key: getattr(batch, key)[part] for key in ("labels", "uids", "mask")}
    views, keys = (tuple(each[part] for each in every) for every in (batch.views, batch.view_keys))
    return replace(batch, views=views, view_keys=keys, **columns)
