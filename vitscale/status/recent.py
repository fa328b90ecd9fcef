"""What the last lines of metrics show together."""

import math
import statistics
from collections.abc import Sequence

from vitscale.status.metrics_log import Row
from vitscale.status.reading import number, text
from vitscale.status.summary import Direction, SlowestRank, Trend

_STRAGGLES_ABOVE = 1.2  # times the median rank
_FEWEST_FOR_A_TREND = 10
_LINES_OF_RANKS = 10


def trend(rows: Sequence[Row]) -> Trend | None:
    """Of the loss; None where there are too few lines."""
    points = [(row["step"], loss) for row in rows if (loss := number(row.get("loss"))) is not None]
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
    times = [row["step_time_s"] for row in rows if row.get("world_size") == rows[-1].get("world_size")]
    return statistics.fmean(times) if times else None


def data_wait(rows: Sequence[Row]) -> float | None:
    """The share of the time that was spent waiting for data."""
    pairs = [(wait, row["step_time_s"]) for row in rows if (wait := number(row.get("data_wait"))) is not None]
    return sum(wait for wait, _ in pairs) / sum(seconds for _, seconds in pairs) if pairs else None


def slowest_rank(rows: Sequence[Row]) -> SlowestRank | None:
    """None where the last line does not tell, as on one rank."""
    last = rows[-1] if rows else {}
    rank = text(last.get("slowest_rank"))
    seconds, median = number(last.get("slowest_rank_s")), number(last.get("median_rank_s"))
    if not rank or seconds is None or median is None:
        return None
    lately = rows[-_LINES_OF_RANKS:]
    return SlowestRank(
        rank=rank,
        seconds=seconds,
        median_seconds=median,
        is_straggler=seconds > _STRAGGLES_ABOVE * median,
        lines=sum(row.get("slowest_rank") == rank for row in lately),
        of_lines=len(lately),
    )
