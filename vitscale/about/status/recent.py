"""Loss trend, pace, data wait and slowest rank, from the last lines of metrics."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from vitscale.runs.metrics import RECENT_LINES, Row
from vitscale.runs.reading import number, text

_STRAGGLES_ABOVE = 1.2  # times the median rank
_STRAGGLES_SHARE = 0.05  # of a step's time, which the others then wait for it
_STRAGGLES_IN = 0.8  # share of the last lines: ranks that share a busy machine take turns
_FEWEST_FOR_A_STRAGGLER = 5
_FEWEST_FOR_A_TREND = 10
_LINES_OF_RANKS = 10

Direction = Literal["falling", "level", "rising"]


@dataclass(frozen=True)
class Trend:
    """The straight line through the losses of the last lines of metrics."""

    change: float  # of the line over `steps`
    steps: int
    direction: Direction  # level if the slope is less than twice its standard error


@dataclass(frozen=True)
class SlowestRank:
    """The slowest rank by the last line of metrics; seconds are of its own work a step.

    `is_straggler`: it takes more than 1.2 times as long as the median rank, this is above 5 % of a step, and it was the
    slowest in four of five of the last lines, of at least five.
    """

    rank: str  # and its host: `3 (host)`
    seconds: float
    median_seconds: float
    is_straggler: bool
    lines: int  # of the last `of_lines` that had this rank as the slowest
    of_lines: int


def trend(rows: Sequence[Row]) -> Trend | None:
    """The trend of the loss; None if there are too few lines."""
    first = rows[0]["step"] if rows else 0  # from which steps count: no float tells large ones apart
    points = [(row["step"] - first, loss) for row in rows if (loss := number(row.get("loss"))) is not None]
    if len(points) < _FEWEST_FOR_A_TREND:
        return None
    steps, losses = zip(*points, strict=True)
    slope, start = statistics.linear_regression(steps, losses)
    middle = statistics.fmean(steps)
    squares = sum((loss - start - slope * step) ** 2 for step, loss in points)
    error = math.sqrt(squares / (len(points) - 2) / sum((step - middle) ** 2 for step in steps))
    direction: Direction = "level" if abs(slope) <= 2 * error else "falling" if slope < 0 else "rising"
    span = steps[-1] - steps[0]
    return Trend(slope * span, span, direction)


def pace(rows: Sequence[Row]) -> float | None:
    """Seconds a step, on as many devices as now; None without a line."""
    spans = [(row, steps) for row, steps in _spans(rows) if row.get("world_size") == rows[-1].get("world_size")]
    return statistics.fmean((row["step_time_s"] for row, _ in spans), [steps for _, steps in spans]) if spans else None


def data_wait(rows: Sequence[Row]) -> float | None:
    """The share of the time that was spent waiting for data, a fraction."""
    waited = seconds = 0.0
    for row, steps in _spans(rows):
        wait = number(row.get("data_wait_s", row.get("data_wait")))
        if wait is not None:
            waited, seconds = waited + steps * wait, seconds + steps * row["step_time_s"]
    return number(waited / seconds) if seconds else None


def _spans(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    """Lines with the steps that each covers, without a process's slower first step if others have lines of more."""
    steps = [row["step"] - before["step"] for before, row in pairwise(rows)]
    first = [row["step"] for row in rows[:1]] if len(rows) < RECENT_LINES else steps[:1]
    spans = list(zip(rows, first + steps, strict=True))
    return [(row, length) for row, length in spans if length > 1] or spans


def slowest_rank(rows: Sequence[Row]) -> SlowestRank | None:
    """The slowest rank; None if the last line does not tell, as with one rank."""
    last = rows[-1] if rows else {}
    rank = text(last.get("slowest_rank"))
    seconds, median = number(last.get("slowest_rank_s")), number(last.get("median_rank_s"))
    if not rank or seconds is None or median is None:
        return None
    lately = rows[-_LINES_OF_RANKS:]
    lines = sum(row.get("slowest_rank") == rank for row in lately)
    costs = seconds > _STRAGGLES_ABOVE * median and seconds - median > _STRAGGLES_SHARE * last["step_time_s"]
    lasts = len(lately) >= _FEWEST_FOR_A_STRAGGLER and lines >= _STRAGGLES_IN * len(lately)
    return SlowestRank(rank, seconds, median, is_straggler=costs and lasts, lines=lines, of_lines=len(lately))
