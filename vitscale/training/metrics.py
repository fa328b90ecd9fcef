"""What a run reports: `metrics.jsonl` and TensorBoard, in the run directory.

`metrics.jsonl` has one JSON object a line, all with `step` (updates done, from 1) and `time` (UTC). Training lines have
`epoch` (epochs done, a fraction), `images_seen`, `loss`, `lr`, `grad_norm`, `images_per_s`, `data_wait_s` (a step;
older files call it `data_wait`), `step_time_s`, `world_size`, `exaflops`, `mfu`, `peak_memory_bytes`,
`checkpoint_stall_s` (training stood still for saves, since the last line), `anomalies` (of the run so far),
`slowest_rank`, `slowest_rank_s` and `median_rank_s` (own seconds a step: forward passes and waiting for data),
`bad_samples` (damaged, since the last line) and `batch_digest`, as far as each is known; evaluations are lines of
their own with `step` and `eval/<evaluator>/<metric>`. A value that is not finite is null: JSON has no NaN.

Losing a metric is better than losing the run: a write that fails is reported once and training goes on.
"""

import json
import logging
import math
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.files.durable import write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends to the metrics of one run; rank 0 alone has one.

    Args:
        run_dir: of the run; it exists.
        resume_step: the step that training continues from, 0 for a new run. What an earlier process wrote about later
            steps is dropped, because those steps are done again.
        tensorboard: whether to write `tensorboard/` too.
    """

    def __init__(self, run_dir: Path, resume_step: int, tensorboard: bool) -> None:
        self._path = run_dir / METRICS_FILE
        self._failed = False
        self._line_is_torn = False
        self._tensorboard: SummaryWriter | None = None
        try:
            _drop_later_lines(self._path, resume_step)
        except OSError as error:
            self._report(error)
        if tensorboard:
            try:
                self._tensorboard = _open_tensorboard(run_dir / TENSORBOARD_DIR, resume_step)
            except OSError as error:
                self._report(error)

    def training(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the metrics of training after `step` updates."""
        self._append(step, values)
        self._to_tensorboard(step, {f"train/{key}": value for key, value in values.items()})

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what `evaluation.evaluate` returned after `step` updates, its keys prefixed by `eval/`."""
        prefixed = {f"eval/{key}": value for key, value in values.items()}
        self._append(step, prefixed)
        self._to_tensorboard(step, prefixed)

    def close(self) -> None:
        """Write out what TensorBoard still holds in memory."""
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                self._report(error)
            self._tensorboard = None

    def _append(self, step: int, values: Mapping[str, float | str]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"step": step, "time": now, **{key: _json_value(value) for key, value in values.items()}}
        try:
            # Opened for each line: a directory that went away is noticed, and one that came back is used again.
            with self._path.open("a", encoding="utf-8") as file:
                start = "\n" if self._line_is_torn else ""
                self._line_is_torn = True
                file.write(f"{start}{json.dumps(row)}\n")
            self._line_is_torn = False
        except OSError as error:
            self._report(error)

    def _to_tensorboard(self, step: int, values: Mapping[str, float | str]) -> None:
        if self._tensorboard is None:
            return
        try:
            for key, value in values.items():
                if not isinstance(value, str):
                    self._tensorboard.add_scalar(key, value, step)
        except OSError as error:
            self._report(error)
            self._tensorboard = None  # its writing thread has died

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            _log.error("METRICS ARE BEING LOST, training goes on: cannot write in %s: %s", self._path.parent, error)


def _open_tensorboard(directory: Path, resume_step: int) -> "SummaryWriter":
    # Imported here: it takes a second that runs without it need not wait.
    from torch.utils.tensorboard import SummaryWriter

    threading.excepthook = _without_traces_of_tensorboard
    return SummaryWriter(str(directory), purge_step=resume_step + 1)


def _without_traces_of_tensorboard(arguments: threading.ExceptHookArgs) -> None:
    """Its writing thread hands an error to the next call, which reports it."""
    is_tensorboards = type(arguments.thread).__module__.startswith("tensorboard.")
    if not (is_tensorboards and isinstance(arguments.exc_value, OSError)):
        threading.__excepthook__(arguments)


def _json_value(value: float | str) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_later_lines(path: Path, last_step: int) -> None:
    """Keep the lines of steps up to `last_step`. A line that a crash tore is dropped as well."""
    if not path.exists():
        return
    kept = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and step <= last_step:
                kept.append(line if line.endswith("\n") else line + "\n")
    write_text(path, "".join(kept))
