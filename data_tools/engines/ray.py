"""Run tasks on a Ray cluster: the one that RAY_ADDRESS names, or one started on this machine.

Every node must reach the source and the output, by a shared file system or a URL. Ray itself tries a task again whose
worker or node has died; a task writes the same bytes each time.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from data_tools.engines.task import Task, Tick
from vitscale.errors import DataError, RecipeError, VitscaleError
from vitscale.files.durable import forbid_writing_by_everybody

_POLL_SECONDS = 0.5
_RETRIES = 3
_ANSWER_SECONDS = 10.0
_OBJECT_STORE_BYTES = 512 << 20  # tasks and their results are small; Ray would take a third of the memory


class _Silence:
    """Ray carries results, not progress: images are counted when their task is done."""

    def __init__(self) -> None:
        self.done = self.rejected = 0

    def advance(self, rejected: bool = False) -> None:
        self.done += 1
        self.rejected += rejected

    def alive(self) -> None:
        pass


def _perform(task: Task) -> tuple[Any, int, int]:
    """On a worker: the result or the error that people can mend, images done, images rejected."""
    forbid_writing_by_everybody()
    progress = _Silence()
    try:
        return task.run(progress), progress.done, progress.rejected
    except VitscaleError as error:
        return error, progress.done, progress.rejected


def run_on_ray(tasks: Iterable[Task], workers: int | None, tick: Tick) -> Iterator[Any]:
    """Run tasks on a cluster, `workers` at a time (None: as many as it has CPUs), yielding what they return.

    Raises:
        RecipeError: Ray is not installed, here or vitscale on a node; or there is no cluster at RAY_ADDRESS.
        VitscaleError: what a task raised.
        DataError: a task whose workers die again and again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
    try:
        import ray
    except ImportError as error:
        raise RecipeError("--engine ray needs Ray, which is not installed: pip install ray") from error
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, workers)
    perform = ray.remote(max_retries=_RETRIES, num_cpus=1)(_perform)
    pending = iter(tasks)
    running: dict[Any, Task] = {}
    done = rejected = 0
    try:
        at_once = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        while True:
            while len(running) < at_once and (task := next(pending, None)) is not None:
                running[perform.remote(task)] = task
            if not running:
                return
            finished, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
            for reference in finished:
                task = running.pop(reference)
                try:
                    outcome, images, of_no_use = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, ImportError):
                        raise RecipeError(
                            f"{task.name}: a node of the cluster lacks what it needs ({error.cause}). Install the same "
                            "vitscale on every node"
                        ) from error
                    raise  # a bug: with the worker's trace
                except ray.exceptions.RayError as error:
                    raise DataError(
                        f"{task.name}: lost on the cluster ({type(error).__name__}, after up to {_RETRIES + 1} tries). "
                        "What is done so far is kept: mend the cause and repeat the command"
                    ) from error
                if isinstance(outcome, VitscaleError):
                    raise outcome
                done, rejected = done + images, rejected + of_no_use
                yield outcome
            tick(done, rejected)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()


def _connect(ray: Any, workers: int | None) -> None:
    """Join the cluster that the environment names, or start one. Raises RecipeError."""
    address = os.environ.get("RAY_ADDRESS")
    start: dict[str, Any] = {}
    if address in (None, "", "local"):
        start = {"num_cpus": workers, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    elif address != "auto":
        _refuse_silent(address)
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR", **start)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RecipeError(f"RAY_ADDRESS={address or ''}: no Ray cluster that can be joined ({reason})") from error


def _refuse_silent(address: str) -> None:
    """Raise RecipeError unless something listens at host:port; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"RAY_ADDRESS={address}: nothing answers there ({error}). Expected host:port of a Ray cluster (`ray start "
            "--head` tells it), or nothing to start one on this machine"
        ) from error
