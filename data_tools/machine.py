"""How a conversion is run: its processes, its share of the tasks, its work folder."""

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
    """How a conversion is run; none of this changes what is written.

    Attributes:
        workers: number of processes; None for one per core.
        engine: what writes the shards: processes on this machine, or a Ray cluster.
        tasks: the share of the tasks that is done here.
        work: local folder for files that only this machine needs; None for the output's own.
        max_reject_rate: largest allowed share of images that cannot be stored, 0 to 1.
        allow_unlabelled: whether more than 1 % of the images may lack a label although others have one.
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
        """What runs tasks on this machine; `places` are the paths and URLs that they use."""
        if any(place.startswith("memory://") for place in places):  # other processes cannot see this memory
            return run_inline
        return lambda tasks, tick: run_in_processes(tasks, self.processes, tick)

    def shard_runner(self, *places: str) -> Run:
        """What runs shard tasks, which a cluster can do; `places` as for `runner`."""
        if self.engine == "local":
            return self.runner(*places)
        from data_tools.engines.ray import run_on_ray

        return lambda tasks, tick: run_on_ray(tasks, self.workers, tick)
