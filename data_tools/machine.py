"""How a conversion is run: which processes, which share of the tasks, where its work folder is."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_tools.engines.inline import run_inline
from data_tools.engines.local import run_in_processes
from data_tools.engines.task import Run
from data_tools.locks import ALL_TASKS, TaskRange

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Machine:
    """How a conversion is run; nothing of it changes what is written.

    Attributes:
        workers: processes; None for one a core.
        engine: where shards are written: by processes of this machine, or a Ray cluster.
        tasks: the share of the tasks that is done here; the others are someone else's.
        work: local folder for what only this machine needs; None for the output's own.
        max_reject_rate: share of images that may be impossible to store.
        allow_unlabelled: whether any share of the images may be without a label where others have one.
    """

    workers: int | None = None
    engine: Engine = "local"
    tasks: TaskRange = ALL_TASKS
    work: Path | None = None
    max_reject_rate: float = 0.01
    allow_unlabelled: bool = False

    @property
    def processes(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def runner(self, *places: str) -> Run:
        """What runs tasks of this machine that reach `places`."""
        if any(place.startswith("memory://") for place in places):  # no other process sees this memory
            return run_inline
        return lambda tasks, tick: run_in_processes(tasks, self.processes, tick)

    def shard_runner(self, *places: str) -> Run:
        """What runs the tasks of shards, which a cluster may do."""
        if self.engine == "local":
            return self.runner(*places)
        from data_tools.engines.ray import run_on_ray

        return lambda tasks, tick: run_on_ray(tasks, self.workers, tick)
