"""A run as its directory tells it, finished or under way: recipe, metrics, cost, evaluations, checkpoints, parent.

Torch is not imported and no tensor is read. Each file is read when it is asked for, and once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.storage import is_url
from vitscale.recipe import Recipe, find_dataset
from vitscale.runs.checkpoint_index import CheckpointIndex, Checkpoints, data_root, find_path, read_checkpoints
from vitscale.runs.directory import recipe_of_run
from vitscale.runs.done import read_done
from vitscale.runs.launches import Launches, read_launches
from vitscale.runs.metrics import MetricsLog, Row
from vitscale.runs.names import CHECKPOINTS, DONE_FILE, LAUNCH_FILE, METRICS_FILE, checkpoints_root
from vitscale.runs.reading import count, number

_GAPS_TOLD = 5
_MOST_PARENTS = 20


@dataclass(frozen=True)
class Cost:
    """What the steps of a run have cost."""

    step: int  # the last one in the metrics
    images: int  # that the run itself has trained on
    seconds: float  # that all steps took
    device_seconds: float | None  # the same, summed over devices; None if nothing tells how many there were
    exaflops: float  # up to that step, without those of a branch's trunk
    mfu: float | None  # the mean over the device-seconds that have one, a fraction; None if none has
    world_size: int | None  # the number of devices in the last steps; None as above
    world_sizes: tuple[int, ...]  # all numbers of devices that it has run on

    @property
    def images_per_s(self) -> float:
        """Images per second of all devices together, over all steps; 0 where the times of the file make no number."""
        return number(self.images / self.seconds if self.seconds else math.inf) or 0.0


class RunFiles:
    """The files of a run's directory, whichever are there; each is read when it is asked for, and once.

    `recipe` is the one in that directory, None if it cannot be read. `log` reads the metrics, by default all lines.
    """

    recipe: Recipe | None

    def __init__(self, directory: Path, recipe: Recipe | None, log: MetricsLog | None = None) -> None:
        self.directory, self.recipe = directory, recipe
        self._log = log or MetricsLog(directory / METRICS_FILE, whole=True)

    @cached_property
    def metrics(self) -> MetricsLog:
        """The metrics."""
        self._log.refresh()
        return self._log

    @cached_property
    def launches(self) -> Launches:
        """What the launches have noted."""
        return read_launches(self.directory / LAUNCH_FILE)

    @property
    def checkpoints_root(self) -> str:
        """The path or URL of the checkpoints."""
        return (
            str(self.directory / CHECKPOINTS) if self.recipe is None else checkpoints_root(self.recipe, self.directory)
        )

    @cached_property
    def checkpoints(self) -> Checkpoints | None:
        """The checkpoints; None if they are at a URL, where they are not looked at."""
        return None if is_url(self.checkpoints_root) else read_checkpoints(Path(self.checkpoints_root))

    @property
    def index(self) -> CheckpointIndex | None:
        """The newest checkpoint's index; None without one, and for checkpoints at a URL."""
        return None if self.checkpoints is None else self.checkpoints.newest

    @cached_property
    def done(self) -> dict[str, Any] | None:
        """The summary of a finished run; None before."""
        content, path = read_done(self.directory), self.directory / DONE_FILE
        if content is None and path.exists():
            raise DataError(f"{path} is damaged: expected a JSON object")
        return content

    @property
    def is_done(self) -> bool:
        """Whether it is finished."""
        return self.done is not None

    def steps_for(self, num_samples: int | None) -> int | None:
        """Steps of the whole run by its recipe; None if they depend on the number of samples and it is not known."""
        if self.recipe is None or (num_samples is None and self.recipe.schedule.duration.epochs is not None):
            return None
        return self.recipe.schedule.duration.to_steps(num_samples or 0, self.recipe.batch.global_size)


class Run(RunFiles):
    """A run, finished or under way. `seen`: the runs that led here by their `parent`; a circle ends there.

    Raises `RecipeError` if there is no run; properties raise `DataError` if the record that they read is broken.
    """

    recipe: Recipe

    def __init__(self, directory: str | Path, seen: Sequence[Path] = ()) -> None:
        super().__init__(Path(directory), recipe_of_run(Path(directory)))
        self._seen = [*seen, self.directory.resolve()]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.resolve().name

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if they depend on the number of samples and nothing tells that."""
        return self.steps_for(None if self.index is None else self.index.num_samples)

    @property
    def best_step(self) -> int | None:
        """The step that was selected; None before the end, and if nothing selects."""
        return count((self.done or {}).get("best_step"))

    @property
    def evaluation(self) -> dict[str, float]:
        """Values by evaluator/metric at the end: of the best step if there is one, else of the last; none before."""
        done = self.done or {}
        values = done.get("evaluation")
        if self.best_step is not None and self.best_step != done.get("step"):
            values = dict(self.metrics.evaluations).get(self.best_step)
        return {
            key: value
            for key, value in (values if isinstance(values, dict) else {}).items()
            if number(value) is not None and key.isprintable()
        }

    @cached_property
    def cost(self) -> Cost | None:
        """What its steps have cost; None before the first."""
        lines, first = self._lines, self.recipe.first_step
        if not lines:
            return None
        steps = [first, *(line["step"] for line in lines)]  # the `first` steps were another run's
        took = [
            (step - before) * line["step_time_s"] for (before, step), line in zip(pairwise(steps), lines, strict=True)
        ]
        newest = None if self.index is None else self.index.world_size
        worlds = [count(line.get("world_size")) or newest for line in lines]
        known = [world for world in worlds if world is not None]
        device_seconds = [seconds * (world or 1) for seconds, world in zip(took, worlds, strict=True)]
        used = [
            (mfu, time) for line, time in zip(lines, device_seconds, strict=True) if (mfu := number(line.get("mfu")))
        ]
        return Cost(
            step=steps[-1],
            images=(steps[-1] - first) * self.recipe.batch.global_size,
            seconds=sum(took),
            device_seconds=sum(device_seconds) if len(known) == len(lines) else None,
            exaflops=lines[-1]["exaflops"] * (1 - first / steps[-1]),
            mfu=sum(mfu * time for mfu, time in used) / sum(time for _, time in used) if used else None,
            world_size=worlds[-1],
            world_sizes=tuple(sorted(set(known))),
        )

    @property
    def notes(self) -> list[str]:
        """What is damaged or missing, and what `cost` leaves out."""
        log, lines, first = self.metrics, self._lines, self.recipe.first_step
        notes = [] if self.checkpoints is None else [*self.checkpoints.problems]
        damaged = log.damaged + log.is_torn + len(log.rows) - len(lines)
        notes += [f"damaged lines of {METRICS_FILE} left out: {damaged}"] if damaged else []
        notes += _gap_notes([line["step"] for line in lines], self.recipe.logging.every, first)
        return notes + ([f"a branch; the {first:,} steps before it are in its trunk's cost"] if first else [])

    @cached_property
    def _lines(self) -> list[Row]:
        return [line for line in self.metrics.rows if number(line.get("exaflops"))]

    @cached_property
    def parent(self) -> "Run | None":
        """The run that `init` names, if it is still there and can be read: a checkpoint's folder names its run."""
        if self.recipe.init is None or len(self._seen) > _MOST_PARENTS:
            return None
        source = Path(self.recipe.init.source)
        if source.parent.name == CHECKPOINTS:
            source = source.parent.parent
        place = find_path(str(source), self.index, self.directory)
        try:
            if place.resolve() in self._seen:
                return None
            parent = Run(place, self._seen)
            _ = parent.metrics, parent.done
        except (RecipeError, DataError):
            return None
        return parent

    @property
    def chain(self) -> list["Run"]:
        """This run and those that it goes back to, the newest first."""
        return [self, *(self.parent.chain if self.parent is not None else [])]

    @property
    def trunk(self) -> "Run":
        """The run whose first step was step 1: this one, or what a branch continues, if that is still there."""
        return self.parent.trunk if self.recipe.first_step and self.parent is not None else self

    @property
    def but_for_the_seed(self) -> dict[str, Any]:
        """What runs that differ only in their seed have in common; branches go with those of the other trunks.

        What runs leave to their devices, which may differ, is left out: only rounding and dropout follow from it.
        """
        content = self.recipe.dump() | {"seed": None}
        content["batch"]["micro_max"] = content["parallelism"]["compile"] = content["parallelism"]["overlap"] = None
        if self.recipe.first_step and self.parent is not None:
            content["init"] = {**content["init"], "from": self.parent.but_for_the_seed}
        return content

    def place_of(self, dataset: str) -> str:
        """Path or URL of a dataset that the recipe names. Raises `RecipeError` and `DataError`."""
        root = self.recipe.data.root if self.index is None else data_root(self.recipe, self.index)
        return find_dataset(dataset, root)


def _gap_notes(steps: Sequence[int], every: int, first: int) -> list[str]:
    """Notes on steps whose metrics are lost. A line is due at every multiple of `every`, and where training stopped."""
    gaps = []
    for before, step in pairwise([first, *steps]):
        covered = (step - 1) // every * every  # the line covers the steps after that one
        if covered > before:
            gaps.append(f"{before + 1:,} to {covered:,}")
    if not gaps:
        return []
    more = f" and {len(gaps) - _GAPS_TOLD:,} times more" if len(gaps) > _GAPS_TOLD else ""
    return [f"steps {', '.join(gaps[:_GAPS_TOLD])}{more} have no metrics; their pace is assumed"]
