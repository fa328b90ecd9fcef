"""Run tasks on a Ray cluster: the one that RAY_ADDRESS names, or one started on this machine.

Every node must reach the source and the output, by a shared file system or a URL. Ray itself retries a task whose
worker or node has died; a task writes the same bytes each time.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from data_tools.engines.task import Counts, Task, Tick
from vitscale.ground.errors import DataError, RecipeError, VitscaleError
from vitscale.ground.files.durable import forbid_writing_by_everybody
from vitscale.ground.ray_cluster import connect, import_ray

_POLL_SECONDS = 0.5
_RETRIES = 3


def _perform(task: Task) -> tuple[Any, int, int]:
    """Runs on a worker. Returns the result, or an error that people can fix; images done; images rejected."""
    forbid_writing_by_everybody()
    progress = Counts()  # not reported: Ray carries only results, so images are counted when their task is done
    try:
        return task.run(progress), progress.done, progress.rejected
    except VitscaleError as error:
        return error, progress.done, progress.rejected


def run_on_ray(tasks: Iterable[Task], workers: int | None, tick: Tick) -> Iterator[Any]:
    """Run tasks on a cluster, `workers` at a time (None: as many as it has CPUs), yielding what they return.

    Raises:
        RecipeError: Ray is not installed, here or vitscale on a node; or there is no cluster at RAY_ADDRESS.
        VitscaleError: what a task raised.
        DataError: a task whose workers die repeatedly.
    """
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        connect(ray, workers)
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
                    raise  # a bug: the worker's traceback is shown
                except ray.exceptions.RayError as error:
                    raise DataError(
                        f"{task.name}: lost on the cluster ({type(error).__name__}, after up to {_RETRIES + 1} tries). "
                        "What is done so far is kept: fix the cause and repeat the command"
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
