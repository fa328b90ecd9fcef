"""What is written into metrics.jsonl is what is read from it."""

import math
from pathlib import Path

import pytest

from vitscale.ground.errors import DataError
from vitscale.runs.metrics import RECENT_LINES, MetricsLines, MetricsLog


def test_lines_that_are_written_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, whole, lines = MetricsLog(path), MetricsLog(path, whole=True), MetricsLines(path, 0)
    log.refresh()
    assert not log.rows and log.line_at is None
    count = RECENT_LINES + 10
    for step in range(1, count + 1):
        lines.training(step, {"loss": math.nan, "step_time_s": 0.5, "world_size": 4})
    lines.evaluation(count, {"validation/top1": 0.25, "validation/loss": math.inf})
    for reader, kept in ((log, RECENT_LINES), (whole, count)):
        reader.refresh()
        assert [row["step"] for row in reader.rows] == list(range(count - kept + 1, count + 1))
        assert reader.seconds == 0.5 * count and reader.device_seconds == 2.0 * count
        assert reader.evaluations == [(count, {"validation/top1": 0.25, "validation/loss": None})]
        assert reader.rows[-1]["loss"] is None and (reader.damaged, reader.is_torn) == (0, False)


def test_what_a_crash_has_torn_is_noticed_and_dropped_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLines(path, 0).training(1, {"step_time_s": 1.0})
    with path.open("a") as file:
        file.write(f'{{"step": {10**400}, "step_time_s": 1.0}}\n{{"step": 2, "step_time_s": {10**400}}}\n{{"step": 2')
    log = MetricsLog(path)
    log.refresh()
    assert (len(log.rows), log.damaged, log.is_torn) == (1, 2, True)
    MetricsLines(path, 1).training(2, {"step_time_s": 3.0})
    log.refresh()
    assert [row["step"] for row in log.rows] == [1, 2] and log.seconds == 4.0 and not log.damaged


def test_a_file_that_cannot_be_read_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        MetricsLog(tmp_path).refresh()
