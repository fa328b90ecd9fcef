"""Literal text, progress, and Ctrl-C while a command works. Loads rich, for which `--help` does not wait."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from typer import Exit

from vitscale.ground.errors import EXIT_INTERRUPTED
from vitscale.ground.safe_text import printable
from vitscale.ground.table import Console

_LINE_SECONDS = 10.0


@contextmanager
def interruptible(state: str) -> Iterator[None]:
    """Ctrl-C, or what a scheduler ends a job by, gives one line, not a trace. Raises Exit(130)."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"interrupted: {state}", highlight=False, soft_wrap=True)
        raise Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def say(line: str, console: Console | None = None) -> None:
    """Print a line literally, by default to standard output, whatever the terminal's width."""
    (console or Console()).print(line, markup=False, highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text to be printed literally: rich's markup and unprintable characters are escaped."""
    return escape(printable(text))


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number done so far: on stderr, a bar on a terminal, else a line every ten seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(None), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=console, expand=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    said = time.monotonic()

    def show(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            say(f"{done:,} of {total:,} {what}", console)

    yield show
