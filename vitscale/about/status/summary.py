"""How a run is doing, as data; what is not known is None everywhere."""

from dataclasses import dataclass
from typing import Any, Literal

from vitscale.about.status.liveness import State
from vitscale.runs.launches import Event

Direction = Literal["falling", "level", "rising"]


@dataclass(frozen=True)
class Trend:
    """The straight line through the losses of the last lines of metrics.

    Attributes:
        change: the line's change over `steps`.
        direction: level if the slope is less than twice its standard error.
    """

    change: float
    steps: int
    direction: Direction


@dataclass(frozen=True)
class SlowestRank:
    """The slowest rank by the last line of metrics; seconds are of its own work a step.

    Attributes:
        rank: the rank and its host: `3 (host)`.
        is_straggler: whether it takes more than 1.2 times as long as the median rank, this is above 5 % of a step, and
            it was the slowest in four of five of the last lines, of at least five.
        lines: how many of the last `of_lines` lines had this rank as the slowest.
    """

    rank: str
    seconds: float
    median_seconds: float
    is_straggler: bool
    lines: int
    of_lines: int


@dataclass(frozen=True)
class Evaluation:
    """Values by evaluator/metric after `step` updates; None for one that is not finite."""

    step: int
    values: dict[str, float | None]


@dataclass(frozen=True)
class Best:
    """The best evaluation by `metric`.

    Attributes:
        is_kept: whether there is a checkpoint of its step; None for checkpoints at a URL, which is not asked.
    """

    step: int
    metric: str
    value: float
    is_kept: bool | None


@dataclass(frozen=True)
class Saved:
    """The checkpoints, and the newest of them.

    Attributes:
        where: path or URL. Nothing more is known about a URL, which is not asked.
        steps: the steps of the checkpoints there, oldest first.
        count: the number of checkpoints there.
        step, age_s, bytes: the newest one's step, age in seconds and size.
    """

    where: str
    steps: list[int] | None
    count: int | None
    step: int | None
    age_s: float | None
    bytes: int | None


@dataclass(frozen=True)
class Restarts:
    """Restarts by `vitscale launch`.

    Attributes:
        launches: how often it was called.
        count: the number of restarts by these calls.
        last: the last restarts, oldest first.
    """

    launches: int
    count: int
    last: list[Event]


@dataclass(frozen=True)
class Anomalies:
    """Batches that must not be trained on.

    Attributes:
        left_out: how often the run skipped batches or went back.
        limit: the recipe's limit for that.
        reports: the number of files in anomalies/.
        last: `step`, `kind` and `policy` of the report of the highest step.
    """

    left_out: int
    limit: int | None
    reports: int
    last: dict[str, Any] | None


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Attributes:
        run: its directory.
        state, why: see `liveness`.
        step, total_steps: updates done, and those of the whole run.
        precision: the precision that the recipe computes in.
        selects: whether the recipe has a `selection`.
        line_age_s: seconds since the last line of metrics.
        loss, lr, images_per_s, mfu, step_time_s, world_size, peak_memory_bytes: the values in that line.
        world_sizes: all numbers of devices that it has run on, in the order in which they first appear.
        trend: the trend of the loss.
        data_wait: the share of the last lines' time that was spent waiting for data, a fraction.
        left_s: seconds that the remaining steps take at the mean pace of the last lines.
        exaflops: exaFLOPs so far.
        hours, device_hours, energy_kwh, cost: for the steps so far, without evaluations, checkpoints and lost steps.
        is_estimated: whether these four are estimates, from parts of a large file.
        verified: what `vitscale verify` found, beginning with `yes` or `no`; None for a run that is not finished.
        evaluation, best: the last one, and the best one by the recipe's `selection`, or else by top-1 accuracy.
        notes: what is damaged or missing.
    """

    run: str
    state: State
    why: str
    step: int | None
    total_steps: int | None
    precision: str | None
    selects: bool
    line_age_s: float | None
    loss: float | None
    trend: Trend | None
    lr: float | None
    images_per_s: float | None
    mfu: float | None
    step_time_s: float | None
    world_size: int | None
    world_sizes: list[int]
    data_wait: float | None
    peak_memory_bytes: float | None
    left_s: float | None
    exaflops: float | None
    hours: float | None
    device_hours: float | None
    energy_kwh: float | None
    cost: float | None
    is_estimated: bool
    evaluation: Evaluation | None
    best: Best | None
    checkpoints: Saved
    verified: str | None
    restarts: Restarts | None
    anomalies: Anomalies | None
    slowest_rank: SlowestRank | None
    notes: list[str]

    @property
    def is_done(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "stopped early")
