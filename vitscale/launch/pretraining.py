"""The ranks of a pre-training on one machine, which may be one of several."""

import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import vitscale
from vitscale.ground.errors import PeerLostError, PreemptedError, RecipeError
from vitscale.ground.machine import count_devices
from vitscale.ground.wording import counted
from vitscale.launch.nodes import Layout, OneNode, ThisNode, fitting
from vitscale.launch.rank import RankCommand
from vitscale.launch.restarts import Launch, Nodes
from vitscale.launch.several_nodes import FirstNode, OtherNode
from vitscale.launch.supervisor import Supervisor, say
from vitscale.recipe import Recipe, load_recipe, refuse_secrets
from vitscale.runs.directory import in_use, is_held
from vitscale.runs.names import RECIPE_FILE, default_run_dir

Resume = Literal["auto", "never"]
_PATIENCE_SECONDS = (0.5, 1.0, 2.0)  # waits for ranks whose launch was killed a moment ago


@dataclass(frozen=True)
class Pretraining:
    """What to pre-train, and on how many ranks a node: None for one a CUDA device, or one on CPUs."""

    recipe: str
    settings: tuple[str, ...] = ()
    run_dir: Path | None = None
    ranks: int | None = None
    resume: Resume = "auto"
    time_limit_minutes: float | None = None
    stop_at: int | None = None
    smoke: bool = False

    @property
    def directory(self) -> Path:
        """The run's directory. Raises `RecipeError` if it is the recipe's and there is no such recipe."""
        return self.run_dir or default_run_dir(self.recipe, smoke=self.smoke)

    @property
    def options(self) -> dict[str, object]:
        """What `vitscale launch` and vitscale/pretrain.py have in common, for `option_words`."""
        return {
            "--run-dir": self.run_dir,
            "--set": self.settings,
            "--resume": None if self.resume == "auto" else self.resume,
            "--stop-at": self.stop_at,
            "--smoke": self.smoke,
            "--time-limit": None if self.time_limit_minutes is None else f"{self.time_limit_minutes:g}",
        }

    def load(self) -> Recipe:
        """The recipe; for a smoke form without the settings, which are that form's. Raises `RecipeError`."""
        return refuse_secrets(load_recipe(self.recipe, [] if self.smoke else self.settings), self.recipe)

    @property
    def global_batch(self) -> int | None:
        """The recipe's global batch; None for a smoke form, whose batch suits any rank count. Raises as `load`."""
        return None if self.smoke else self.load().batch.global_size


def launch_pretraining(what: Pretraining, place: ThisNode | None = None, *, max_restarts: int = 3) -> int:
    """Pre-train on this machine (with a `place`, on other nodes too), with restarts as needed. Returns the exit code.

    Raises `RecipeError` for mistakes that show before anything starts, `PreemptedError` if the time is up before a
    restart, `PeerLostError` if no device is left or a node does not come.
    """
    global_batch, run_dir = what.global_batch, what.directory
    if place is None or place.node == 0:
        _refuse_if_held(run_dir)
    with Supervisor() as supervisor:
        nodes: Nodes = OneNode(global_batch)
        if place is not None and place.nodes > 1 and place.node == 0:
            nodes = FirstNode(place, global_batch, supervisor, run_dir)
        elif place is not None and place.nodes > 1:
            nodes = OtherNode(place, supervisor, run_dir)
        ranks = PretrainingRanks(what, nodes=nodes)
        stops_early = what.stop_at is not None
        return Launch(ranks.run_dir, ranks, supervisor, nodes, max_restarts=max_restarts, stops_early=stops_early).run()


def _refuse_if_held(run_dir: Path) -> None:
    """Raise if another launch trains there: this one must not write into that one's journal."""
    for seconds in (*_PATIENCE_SECONDS, None):
        if not is_held(run_dir):
            return
        if seconds is None:
            raise in_use(run_dir)
        time.sleep(seconds)


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line: one for each value of several, none for None and False."""
    words = []
    for name, values in options.items():
        for value in values if isinstance(values, list | tuple) else (values,):
            if value is not None and value is not False:
                words += [name] if value is True else [name, str(value)]
    return words


def rank_commands(command: Sequence[str], layout: Layout) -> list[RankCommand]:
    """The commands of a node's ranks, which all run the same program."""
    shared = {
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.ranks),
        "MASTER_ADDR": layout.address,
        "MASTER_PORT": str(layout.port),
    }
    ranks = range(layout.first_rank, layout.first_rank + layout.ranks)
    return [
        RankCommand(rank, command, shared | {"RANK": str(rank), "LOCAL_RANK": str(local)})
        for local, rank in enumerate(ranks)
    ]


class PretrainingRanks:
    """Makes the commands of each attempt: called with its number, counted from 0."""

    def __init__(
        self, what: Pretraining, count: Callable[[], int | None] = count_devices, nodes: Nodes | None = None
    ) -> None:
        self.run_dir = what.directory
        self._what, self._count, self._nodes = what, count, nodes or OneNode(what.global_batch)
        self._began = time.monotonic()
        self._held_a_run = (self.run_dir / RECIPE_FILE).exists()
        self._devices: int | None = None

    def __call__(self, attempt: int) -> list[RankCommand]:
        """The attempt's commands; none if told to end while waiting for other nodes. Raises as `launch_pretraining`."""
        devices = self._what.ranks or max(1, self._count_devices())
        layout = self._nodes.meet(devices, is_asked_for=self._what.ranks is not None)
        if layout is None:
            return []
        if layout.ranks < devices:
            say(f"uses {layout.ranks} of {devices} CUDA devices, the most that together divide batch.global")
        ranks = counted(layout.world_size, "rank")
        if layout.world_size > layout.ranks:
            ranks = f"{layout.ranks} of {ranks}"
        say(f"{ranks} on {socket.gethostname()}, run directory {self.run_dir}")
        return self.commands(layout, attempt)

    def commands(self, layout: Layout, attempt: int) -> list[RankCommand]:
        """The commands of this node's ranks."""
        program = str(Path(vitscale.__file__).with_name("pretrain.py"))
        return rank_commands([sys.executable, program, *self._arguments(attempt)], layout)

    def fitting_here(self) -> int:
        """The number of ranks of this node if it were the only one."""
        return self._what.ranks or fitting([max(1, self._count_devices())], self._what.global_batch)[0]

    def _arguments(self, attempt: int) -> list[str]:
        what, left = self._what, None
        if what.time_limit_minutes is not None:
            left = what.time_limit_minutes - (time.monotonic() - self._began) / 60
            if left <= 0:
                raise PreemptedError(f"the time limit of {what.time_limit_minutes:g} minutes has been reached")
        # Only the first attempt may refuse a run that is there already; later ones continue the first one's.
        resume = what.resume if attempt == 0 or self._held_a_run else "auto"
        now = replace(what, run_dir=self.run_dir, resume=resume, time_limit_minutes=left)
        return option_words({"--recipe": what.recipe} | now.options)

    def _count_devices(self) -> int:
        """The number of CUDA devices that this machine has now."""
        devices, before = self._count(), self._devices
        if devices is None:
            if before is None:
                raise RecipeError("the CUDA devices of this machine cannot be counted: set --ranks, or see nvidia-smi")
            say("WARNING: the CUDA devices cannot be counted: trying as many as before")
            devices = before
        if devices == 0 and before:
            raise PeerLostError(f"none of this machine's {before} CUDA devices is left; see nvidia-smi")
        if before is not None and devices != before:
            say(f"{counted(devices, 'CUDA device')} instead of {before}")
        self._devices = devices
        return devices
