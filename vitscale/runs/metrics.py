"""metrics.jsonl: what a run reports while it trains.

docs/operations.md says what the lines have. Older files call `data_wait_s` `data_wait`. A value that is not finite is
null, because JSON has no NaN.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitscale.ground.errors import DataError, MachineError
from vitscale.ground.files.durable import durable_file
from vitscale.ground.storage import regular
from vitscale.ground.wording import finite
from vitscale.runs.reading import count, number, parse_object

if TYPE_CHECKING:
    import numpy as np

RECENT_LINES = 50

_LONGEST_LINE = 1 << 20  # bytes
_MOST_BYTES = 8 << 30
OF_EVALUATIONS = "eval/"

_log = logging.getLogger(__name__)

Row = dict[str, Any]


class MetricsLines:
    """Appends lines to a run's metrics.jsonl; only rank 0 has one.

    Losing a metric is better than losing the run: a failed write is reported once, and training continues. Lines of an
    earlier process about steps after `resume_step`, 0 for a new run, are dropped, because those steps are done again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._failed = False
        self._line_is_torn = False
        try:
            _drop_later_lines(path, resume_step)
        except OSError as error:
            self.report(error)

    def training(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write training metrics after `step` updates."""
        row = {"step": step, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **finite(values)}
        try:
            # Opened for each line, to notice a directory that has disappeared and to use it again if it comes back.
            with open(self._path, "a", encoding="utf-8", opener=regular) as file:
                start = "\n" if self._line_is_torn else ""
                self._line_is_torn = True
                file.write(f"{start}{json.dumps(row)}\n")
            self._line_is_torn = False
        except OSError as error:
            self.report(error)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write an evaluation's values, by evaluator/metric, after `step` updates."""
        self.training(step, {f"{OF_EVALUATIONS}{key}": value for key, value in values.items()})

    def report(self, error: OSError) -> None:
        """Report, only once, that metrics are being lost."""
        if not self._failed:
            self._failed = True
            _log.error("METRICS ARE BEING LOST, training continues: cannot write in %s: %s", self._path.parent, error)


def rows_up_to(path: Path, last_step: int) -> Iterator[Row]:
    """The undamaged lines of steps up to `last_step`; none if the file cannot be read."""
    with suppress(OSError), open(path, "rb", opener=regular) as lines:
        for _, row in _up_to(lines, last_step):
            yield row


def _drop_later_lines(path: Path, last_step: int) -> None:
    """Keep only the lines of steps up to `last_step`. A line cut short by a crash is dropped as well."""
    if not path.exists():
        return
    with open(path, "rb", opener=regular) as lines, durable_file(path) as kept:
        for line, _ in _up_to(lines, last_step):
            kept.write(line.rstrip(b"\n") + b"\n")


def _up_to(lines: Iterable[bytes], last_step: int) -> Iterator[tuple[bytes, Row]]:
    for line in lines:
        row = parse_object(line)
        step = count(row.get("step")) if row else None
        if row is not None and step is not None and step <= last_step:
            yield line, row


class MetricsLog:
    """Reads metrics.jsonl of one run as it grows: each `refresh` reads what was appended since the last one.

    With `whole` every training line is kept, otherwise the newest are.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path, self._whole = path, whole
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode = inode
        self._read_to = 0
        self._step = 0
        # Training lines as they are in the file, oldest first.
        self.rows: deque[Row] = deque(maxlen=None if self._whole else RECENT_LINES)
        self.seconds = 0.0  # that all steps took, by `step_time_s`
        self.device_seconds: float | None = 0.0  # summed over devices; None if a line does not say how many there were
        self.world_sizes: dict[int, None] = {}  # the numbers of devices, in the order in which they first appear
        # (step, values by evaluator/metric; None for one that is not finite), in the order of the file.
        self.evaluations: list[tuple[int, dict[str, float | None]]] = []
        self.damaged = 0  # unusable lines
        self.is_torn = False  # the file ends in the middle of a line: it is being written, or a crash has cut it
        self.line_at: float | None = None  # when the last line was written, in seconds since 1970; None without one

    def keys(self) -> list[str]:
        """The names of the columns of `rows`."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, key: str) -> "np.ndarray":
        """A column of `rows`: integers, or floats, NaN where a line has no number, or objects. Raises `DataError`."""
        import numpy as np  # whoever only watches runs does without

        values = [row.get(key) for row in self.rows]
        if values and key not in self.keys():
            raise DataError(f"{self._path}: no column {key!r}; it has {', '.join(self.keys())}")
        if all(isinstance(value, int | float | None) for value in values):
            return np.array([math.nan if (known := number(value)) is None else known for value in values])
        return np.array(values, object)

    def pandas(self) -> Any:
        """`rows` as a DataFrame by step. Raises `MachineError` without pandas."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            raise MachineError("this needs pandas: pip install pandas") from None
        return pandas.DataFrame({key: self[key] for key in self}).set_index("step")

    def refresh(self) -> None:
        """Read what was appended since the last call. Raises `DataError` if the file cannot be read."""
        try:
            with open(self._path, "rb", opener=regular) as file:
                self._read(file)
        except FileNotFoundError:
            self._begin(None)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from None

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if status.st_size > _MOST_BYTES:  # holes in a file take no room on the disk, but hours to be read
            raise DataError(f"{self._path}: {status.st_size:,} bytes; expected at most {_MOST_BYTES:,}")
        if status.st_ino != self._inode or status.st_size < self._read_to:
            self._begin(status.st_ino)  # resuming replaces the file
        self.line_at = status.st_mtime if status.st_size else None
        file.seek(self._read_to)
        self.is_torn = False
        while line := file.readline(_LONGEST_LINE):
            if len(line) < _LONGEST_LINE and not line.endswith(b"\n"):  # it may be half written
                self.is_torn = True
                break
            self._read_to += len(line)
            self._take(line)

    def _take(self, line: bytes) -> None:
        row = parse_object(line)
        step = count(row.get("step")) if row else None
        if row is None or step is None:
            self.damaged += 1
            return
        values = {
            key.removeprefix(OF_EVALUATIONS): number(value)
            for key, value in row.items()
            if key.startswith(OF_EVALUATIONS) and key.isprintable()
        }
        if values:
            self.evaluations.append((step, values))
        elif (number(row.get("step_time_s")) or 0) > 0 and step > self._step:
            self._add(row)
        else:
            self.damaged += 1

    def _add(self, row: Row) -> None:
        seconds = (row["step"] - max(self._step, count(row.get("first_step")) or 0)) * row["step_time_s"]
        world_size = count(row.get("world_size"))
        if world_size is not None:
            self.world_sizes[world_size] = None
        self.rows.append(row)
        self._step = row["step"]
        self.seconds += seconds
        if world_size is None or self.device_seconds is None:
            self.device_seconds = None
        else:
            self.device_seconds += seconds * world_size
