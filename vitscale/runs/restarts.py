"""How long restarts of a run have taken, from its launches and its metrics."""

from bisect import bisect_right
from pathlib import Path

from vitscale.runs.reading import timestamp
from vitscale.runs.run import RunFiles


def restart_times(run_dir: Path) -> list[float]:
    """Seconds from the end of an attempt to the beginning of the next attempt's first step, for each restart.

    Restarts that reached no step are left out, and so are those whose steps a later attempt repeated, because their
    lines of metrics are gone. The time until a launch notices that a rank hangs is not included.

    Raises `DataError` if a file cannot be read.
    """
    run = RunFiles(run_dir, None)
    ended = [(time, row["step_time_s"]) for row in run.metrics.rows if (time := timestamp(row.get("time"))) is not None]
    failures = [event.time for event in run.launches.restarts]
    found = []
    for place, failure in enumerate(failures):
        first = bisect_right(ended, failure, key=lambda line: line[0])
        until = failures[place + 1] if place + 1 < len(failures) else float("inf")
        if first < len(ended) and ended[first][0] < until:
            found.append(max(0.0, ended[first][0] - ended[first][1] - failure))
    return found
