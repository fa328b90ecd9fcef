"""How far a run is, for people: one live line at a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

from rich.progress import BarColumn, Progress, TextColumn

from vitscale.ground.table import Console

PLAIN_INTERVAL_S = 30.0
_STATUS_WIDTH = 66  # of the text beside the bar, without its three numbers of steps
_LONGEST_S = 10**12  # about what a timedelta holds


class TrainingProgress:
    """Shows step, loss, images/s and the time left; rank 0 alone has one. A context manager.

    The time left comes from the mean pace since the first step of this process, evaluations and checkpoints included
    and start-up and compilation not.

    Args:
        total_steps: steps of the whole run.
        step: steps done before this process.
        console: where to write; None is standard output.
    """

    def __init__(
        self, total_steps: int, step: int = 0, *, console: Console | None = None, clock: Callable = time.monotonic
    ) -> None:
        self._total, self._console, self._clock = total_steps, console or Console(), clock
        self._first: tuple[int, float] | None = None  # step and time of the first one of this process
        self._last_line = -PLAIN_INTERVAL_S
        self._status = ""
        self._live: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            steps = TextColumn("step {task.completed:,.0f}/{task.total:,.0f}")
            room = self._console.width - _STATUS_WIDTH - 3 * len(f"{total_steps:,}")
            bar = BarColumn(min(40, max(4, room)))
            self._live = Progress(steps, bar, TextColumn("{task.description}"), console=self._console)
            self._task = self._live.add_task("starting", total=total_steps, completed=step)

    def __enter__(self) -> "TrainingProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with _without_terminal():
                self._live.stop()

    def advance(self, step: int) -> None:
        """Move the live line to `step` updates done: a new time left; the last report's loss, with its step."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        if self._live is not None:
            with _without_terminal():
                status = f"{self._status}  ETA {self._time_left(step, now)}"
                self._live.update(self._task, completed=step, description=status.strip())

    def update(self, step: int, *, loss: float, lr: float, images_per_s: float) -> None:
        """Report after `step` updates. Without a terminal this prints at most every 30 seconds, and at the end."""
        self._status = f"loss {loss:.4f} at step {step:,}  {images_per_s:,.1f} images/s"
        is_first = self._first is None
        self.advance(step)
        now = self._clock()
        if self._live is None and (is_first or step >= self._total or now - self._last_line >= PLAIN_INTERVAL_S):
            self._last_line = now
            values = f"loss {loss:.4f}  lr {lr:.2e}  {images_per_s:,.1f} images/s"
            self.note(f"step {step:,}/{self._total:,}  {values}  ETA {self._time_left(step, now)}")

    def note(self, message: str) -> None:
        """Print a line, above the live one if there is one."""
        with _without_terminal():
            # soft_wrap: a log line stays one line, whatever width rich assumes of a file.
            self._console.print(message, markup=False, highlight=False, soft_wrap=self._live is None)

    def _time_left(self, step: int, now: float) -> str:
        assert self._first is not None
        first_step, start = self._first
        if step >= self._total:
            return "0:00:00"
        if step == first_step:
            return "-"
        seconds = (self._total - step) * (now - start) / (step - first_step)
        return str(timedelta(seconds=min(round(seconds), _LONGEST_S)))


def tell(message: str) -> None:
    """Print a line where there is no progress to show yet, or any more."""
    with _without_terminal():
        print(message, flush=True)


def _without_terminal() -> AbstractContextManager[None]:
    """Ignore a terminal or pipe that was closed, or a full disk: it must not end a run in the middle of a save.

    Rich answers a closed pipe by turning its output off and ending the process.
    """
    return suppress(OSError, SystemExit)
