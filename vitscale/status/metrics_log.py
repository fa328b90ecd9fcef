"""metrics.jsonl, read as it grows: what was appended since the last look, and of a large file only parts."""

import os
import statistics
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from vitscale.errors import DataError
from vitscale.status.reading import count, number, parse_object

RECENT_LINES = 50

# Some 30,000 lines are read in a fraction of a second. Of what is longer, the end is read, and before it samples.
_WHOLE_BYTES = 8 << 20
_END_BYTES = 4 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 8 << 10

Row = dict[str, Any]


class MetricsLog:
    """The metrics of one run.

    Attributes:
        recent: the newest lines of training, as they are, oldest first, at most RECENT_LINES.
        seconds: that all steps took, by `step_time_s`.
        device_seconds: the same, summed over devices; None where a line does not tell how many there were.
        evaluations: (step, values by evaluator/metric; None for one that is not finite), in the order of the file.
        is_sampled: whether the file is so large that sums are estimates and early evaluations are missing.
        damaged: lines that cannot be used.
        line_at: when the last line was written, in seconds since 1970; None without any.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode = inode
        self._read_to = 0
        self._step = 0
        self.recent: deque[Row] = deque(maxlen=RECENT_LINES)
        self.seconds = 0.0
        self.device_seconds: float | None = 0.0
        self.evaluations: list[tuple[int, dict[str, float | None]]] = []
        self.is_sampled = False
        self.damaged = 0
        self.line_at: float | None = None

    def refresh(self) -> None:
        """Read what was appended since the last call. Raises `DataError` where the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                self._read(file)
        except FileNotFoundError:
            self._begin(None)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from None

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._read_to:
            self._begin(status.st_ino)  # resuming replaces the file
        self.line_at = status.st_mtime if status.st_size else None
        if status.st_size - self._read_to > _WHOLE_BYTES:
            end = status.st_size - _END_BYTES
            self._sample(file, self._read_to, end)
            file.seek(end)
            self._read_to = end + len(file.readline(_END_BYTES))
        file.seek(self._read_to)
        content = file.read(status.st_size - self._read_to)
        whole = content.rfind(b"\n") + 1  # the last line may be half written
        for line in content[:whole].split(b"\n")[:-1]:
            self._take(line)
        self._read_to += whole

    def _sample(self, file: BinaryIO, start: int, stop: int) -> None:
        """Each sample stands for the steps since the one before, by its mean pace."""
        self.is_sampled = True
        for sample in range(_SAMPLES):
            file.seek(start + (stop - start) * sample // _SAMPLES)
            lines = file.read(_SAMPLE_BYTES).split(b"\n")[1:-1]
            rows = [row for row in map(parse_object, lines) if row and _is_training(row) and row["step"] > self._step]
            if rows:
                self._add(rows[-1], statistics.fmean(row["step_time_s"] for row in rows))

    def _take(self, line: bytes) -> None:
        row = parse_object(line)
        step = count(row.get("step")) if row else None
        if row is None or step is None:
            self.damaged += 1
            return
        values = {key[5:]: number(value) for key, value in row.items() if key.startswith("eval/")}
        if values:
            self.evaluations.append((step, values))
        elif _is_training(row) and step > self._step:
            self._add(row, row["step_time_s"])
            self.recent.append(row)
        else:
            self.damaged += 1

    def _add(self, row: Row, step_time: float) -> None:
        seconds = (row["step"] - self._step) * step_time
        world_size = count(row.get("world_size"))
        self._step = row["step"]
        self.seconds += seconds
        if world_size is None or self.device_seconds is None:
            self.device_seconds = None
        else:
            self.device_seconds += seconds * world_size


def _is_training(row: Row) -> bool:
    return count(row.get("step")) is not None and (number(row.get("step_time_s")) or 0) > 0
