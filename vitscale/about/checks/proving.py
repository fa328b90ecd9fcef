"""Starts the ranks of a proof in a folder of their own, and reads what they have found."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitscale.about.checks.small_form import STEPS, small_form
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.ground.errors import VitscaleError
from vitscale.ground.machine import count_devices, free_port
from vitscale.ground.wording import counted
from vitscale.launch import RankCommand, Supervisor, fitting
from vitscale.launch.ends import EXIT_PREEMPTED, cause
from vitscale.recipe import load_recipe
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.names import RECIPE_FILE

PROOF_FILE = "proof.json"
_MOST_ON_CPUS = 2
_SAMPLES = 96


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
    shared = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-P", "-m", "vitscale.about.checks.rank", str(folder)]
    commands = [
        RankCommand(rank, command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    with Supervisor() as supervisor:
        ends = supervisor.run(commands)
    if supervisor.told == signal.SIGINT:
        raise KeyboardInterrupt  # nothing was saved: as of any other command
    end = cause(ends)
    if end is not None or supervisor.told is not None:
        error = VitscaleError("nothing was proved" + ("" if end is None else f": {end.describe().strip()}"))
        error.exit_code = EXIT_PREEMPTED if end is None else end.code
        raise error
