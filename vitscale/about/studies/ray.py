"""Entries on a Ray cluster, each a task that runs `vitscale launch` where Ray has room for it.

Every node must reach the study's folder, its recipes and the data, under the same paths.
"""

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitscale.about.studies.engine import start_launch
from vitscale.ground.errors import PeerLostError, PreemptedError, RecipeError
from vitscale.ground.ray_cluster import connect, import_ray
from vitscale.launch import Pretraining

_LOOK_EVERY_SECONDS = 0.2
_RETRIES = 3


class RayEngine:
    """Tasks on the cluster that RAY_ADDRESS names, or on one started on this machine.

    By default one entry at a time a GPU, or a node in a cluster without GPUs. The options `gpus` and `cpus` are of each
    entry: by default one CPU, and one GPU if there are any.

    Raises `RecipeError` if Ray is missing, there is no cluster, or it can never provide what an entry needs.
    """

    def __init__(self, slots: int | None, options: Mapping[str, str]) -> None:
        self._ray = import_ray()
        connect(self._ray, None)
        there = self._ray.cluster_resources()
        wanted = {"gpus": min(1, int(there.get("GPU", 0))), "cpus": 1} | _numbers(options)
        for name, resource in (("gpus", "GPU"), ("cpus", "CPU")):
            if wanted[name] > there.get(resource, 0):
                raise RecipeError(f"--engine-option {name}={wanted[name]}: the cluster has {there.get(resource, 0):g}")
        own = int(there["GPU"]) // wanted["gpus"] if wanted["gpus"] else len(self._ray.nodes())
        self._slots = slots or own
        remote = self._ray.remote(max_retries=_RETRIES, num_cpus=wanted["cpus"], num_gpus=wanted["gpus"])
        self._perform = remote(perform)
        self._tasks: dict[Any, str] = {}

    @property
    def running(self) -> Collection[str]:
        return self._tasks.values()  # they end with the process that started them

    @property
    def room(self) -> int:
        return self._slots - len(self._tasks)

    def start(self, works: Sequence[Pretraining]) -> None:
        for what in works:
            assert what.run_dir is not None
            absolute = replace(what, recipe=str(Path(what.recipe).absolute()), run_dir=what.run_dir.absolute())
            self._tasks[self._perform.remote(absolute)] = what.run_dir.name

    def ended(self) -> Mapping[str, int]:
        """Name -> exit code. Raises `RecipeError` if a node lacks what it needs."""
        if not self._tasks:
            return {}
        ready, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
        return {self._tasks.pop(task): self._code(task) for task in ready}

    def _code(self, task: Any) -> int:
        errors = self._ray.exceptions
        try:
            return int(self._ray.get(task))
        except errors.TaskCancelledError:
            return PreemptedError.exit_code
        except errors.RayTaskError as error:
            if isinstance(error.cause, ImportError):
                raise RecipeError(
                    f"a node of the cluster lacks what it needs ({error.cause}). Install the same vitscale everywhere"
                ) from error
            raise  # a bug: with the worker's trace
        except errors.RayError:
            return PeerLostError.exit_code  # the worker or its node has died again and again

    def tell_to_end(self) -> None:
        """Interrupt the tasks, which pass SIGTERM on."""
        for task in self._tasks:
            self._ray.cancel(task)

    def kill(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)  # launches die with their workers


def perform(what: Pretraining) -> int:
    """Run a launch on a worker. Returns its exit code."""
    process = start_launch(what, {})
    while process.poll() is None:
        try:
            time.sleep(_LOOK_EVERY_SECONDS)  # not in `wait`, which would keep Ray's interrupt waiting
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
    return process.returncode if process.returncode >= 0 else PeerLostError.exit_code


def _numbers(options: Mapping[str, str]) -> dict[str, int]:
    for name, value in options.items():
        if name not in ("gpus", "cpus"):
            raise RecipeError(f"--engine-option {name}: --engine ray has gpus and cpus")
        if not value.isdecimal():
            raise RecipeError(f"--engine-option {name}={value}: expected a whole number")
    return {name: int(value) for name, value in options.items()}
