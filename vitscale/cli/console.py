"""Literal text for a terminal, and Ctrl-C while a command works. Loads rich, for which `--help` does not wait."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from typer import Exit

from vitscale.ground.errors import EXIT_INTERRUPTED
from vitscale.ground.safe_text import printable
from vitscale.ground.table import Console


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
