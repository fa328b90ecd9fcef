"""The ranks of a pre-training on one machine."""

import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import vitscale
from vitscale.errors import PeerLostError, PreemptedError, RecipeError
from vitscale.launch.machine import count_devices, hold_port
from vitscale.launch.rank import RankCommand
from vitscale.launch.restarts import Launch
from vitscale.launch.supervisor import Supervisor, say
from vitscale.recipe import load_recipe
from vitscale.run_directory import RECIPE_FILE, default_run_dir

Resume = Literal["auto", "never"]


@dataclass(frozen=True)
class Pretraining:
    """What to pre-train, and on how many ranks; None for one a CUDA device, or one on CPUs."""

    recipe: str
    settings: tuple[str, ...] = ()
    run_dir: Path | None = None
    ranks: int | None = None
    resume: Resume = "auto"
    time_limit_minutes: float | None = None
    stop_at: int | None = None
    smoke: bool = False


def launch_pretraining(
    what: Pretraining, *, max_restarts: int = 3, count: Callable[[], int | None] = count_devices
) -> int:
    """Pre-train on this machine's devices, as often as it takes: the exit code.

    Raises `RecipeError` for what can be seen before anything starts, `PreemptedError` when the time is up before a
    restart, `PeerLostError` where no device is left.
    """
    with Supervisor() as supervisor:
        ranks = PretrainingRanks(what, count)
        launch = Launch(
            ranks.run_dir, ranks, supervisor, max_restarts=max_restarts, stops_early=what.stop_at is not None
        )
        return launch.run()


class PretrainingRanks:
    """The commands of each attempt: called with its number, counted from 0."""

    def __init__(self, what: Pretraining, count: Callable[[], int | None] = count_devices) -> None:
        recipe = load_recipe(what.recipe, [] if what.smoke else what.settings)
        self.run_dir = what.run_dir or default_run_dir(what.recipe, smoke=what.smoke)
        # The smoke form has a batch that suits any number of ranks.
        self._global_batch = None if what.smoke else recipe.batch.global_size
        self._what, self._count = what, count
        self._began = time.monotonic()
        self._held_a_run = (self.run_dir / RECIPE_FILE).exists()
        self._devices: int | None = None
        self._port: socket.socket | None = None

    def __call__(self, attempt: int) -> list[RankCommand]:
        """Raises as `launch_pretraining` does."""
        size = self._what.ranks or self._fitting_ranks()
        command = [sys.executable, str(Path(vitscale.__file__).with_name("pretrain.py")), *self._arguments(attempt)]
        if self._port is not None:
            self._port.close()
        self._port = hold_port()
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
        }
        say(f"{size} rank(s) on {socket.gethostname()}, run directory {self.run_dir}")
        own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
        return [RankCommand(rank, command, shared | environment) for rank, environment in enumerate(own)]

    def _arguments(self, attempt: int) -> list[str]:
        what = self._what
        # Only the first attempt may find a run that it is not to continue; the others continue the first one's.
        resume = what.resume if attempt == 0 or self._held_a_run else "auto"
        arguments = ["--recipe", what.recipe, "--run-dir", str(self.run_dir), "--resume", resume]
        for setting in what.settings:
            arguments += ["--set", setting]
        if what.smoke:
            arguments.append("--smoke")
        if what.stop_at is not None:
            arguments += ["--stop-at", str(what.stop_at)]
        if what.time_limit_minutes is not None:
            left = what.time_limit_minutes - (time.monotonic() - self._began) / 60
            if left <= 0:
                raise PreemptedError(f"the time limit of {what.time_limit_minutes:g} minutes is over")
            arguments += ["--time-limit", str(left)]
        return arguments

    def _fitting_ranks(self) -> int:
        """The most ranks that this machine has devices for and that divide the global batch; one on CPUs."""
        devices, before = self._count(), self._devices
        if devices is None:
            if before is None:
                raise RecipeError("the CUDA devices of this machine cannot be counted: set --ranks, or see nvidia-smi")
            say("WARNING: the CUDA devices cannot be counted: trying as many as before")
            devices = before
        if devices == 0 and before:
            raise PeerLostError(f"none of this machine's {before} CUDA devices is left; see nvidia-smi")
        if before is not None and devices != before:
            say(f"{devices} CUDA device(s) instead of {before}")
        self._devices = devices
        size = max(1, devices)
        if self._global_batch is not None:
            while self._global_batch % size:
                size -= 1
            if size < devices:
                say(f"uses {size} of {devices} CUDA devices, the most that divide batch.global {self._global_batch:,}")
        return size
