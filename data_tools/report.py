"""What a conversion shows: progress while it runs, a table of totals when it is done."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from vitscale.ground.table import Console, number

_LINE_SECONDS = 10.0


@dataclass
class Totals:
    """Counts over the whole conversion."""

    samples: int = 0  # written
    passed_through: int = 0  # samples whose JPEG is the source's own, byte for byte
    transcoded: int = 0  # samples whose JPEG is new
    unlabelled: int = 0  # samples without a label
    rejected: int = 0  # images that cannot be stored
    removed: int = 0  # images left out as copies of test images
    shards: int = 0
    bytes: int = 0  # of all shards
    seconds: float = 0.0  # time of this call
    images_now: int = 0  # images that this call converted
    ignored: Counter[str] = field(default_factory=Counter)  # number of files that are not images, by reason

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"seconds": round(self.seconds, 3), "ignored": dict(self.ignored)}


class ProgressDisplay:
    """Shows progress: a bar on a terminal, a line every ten seconds elsewhere, with images/s and the time left.

    `images`, the number expected, is None if it is unknown.
    """

    def __init__(self, console: Console, verb: str, images: int | None) -> None:
        self._console, self._verb, self._images = console, verb, images
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(verb),
                BarColumn(None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:,.0f} images/s"),
                TextColumn("rejected {task.fields[rejected]:,}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._images, rate=0.0, rejected=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, rejected: int) -> None:
        """Show that `done` images are finished, `rejected` of them unusable."""
        now = time.monotonic()
        rate = done / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=rate, rejected=rejected)
        elif now - self._said >= _LINE_SECONDS:
            self._said = now
            if self._images is None:
                what = f"{done:,} images, {rate:,.0f} images/s"
            else:
                left = f"{(self._images - done) / rate:,.0f} s left" if rate else "time left unknown"
                what = f"{done:,} of {self._images:,} images, {rate:,.0f} images/s, {left}, rejected {rejected:,}"
            self._console.print(f"{self._verb}: {what}", highlight=False)


def say(console: Console, line: str) -> None:
    """Print a line without wrapping or highlighting it."""
    console.print(line, highlight=False, soft_wrap=True)


def summary(totals: Totals) -> Table:
    """The table of totals shown at the end."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    ignored = ", ".join(f"{count:,} {reason}" for reason, count in sorted(totals.ignored.items())) or "0"
    for name, value in (
        ("samples", f"{totals.samples:,}"),
        ("passed through", f"{totals.passed_through:,}"),
        ("transcoded", f"{totals.transcoded:,}"),
        ("unlabelled", f"{totals.unlabelled:,}"),
        ("rejected", f"{totals.rejected:,}" + (" (listed in rejects.parquet)" if totals.rejected else "")),
        ("removed", f"{totals.removed:,}" + (" (listed in dedup.parquet)" if totals.removed else "")),
        ("files ignored", ignored),
        ("shards", f"{totals.shards:,}"),
        ("bytes", f"{totals.bytes:,}"),
    ):
        table.add_row(name, value)
    if totals.images_now:
        table.add_row("images/s, start included", number(0)(totals.images_now / max(totals.seconds, 1e-9)))
        table.add_row("seconds", f"{totals.seconds:,.1f}")
    return table
