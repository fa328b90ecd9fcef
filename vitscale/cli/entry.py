"""The three installed commands. Imports next to nothing, so that Ctrl-C is under control while the rest is imported."""

import os
import signal
from importlib import import_module

from vitscale.ground.errors import EXIT_INTERRUPTED


def vitscale() -> None:
    """`vitscale`."""
    _run("main")


def convert() -> None:
    """`vitscale-convert`."""
    _run("convert")


def flops() -> None:
    """`vitscale-flops`."""
    _run("flops")


def _run(module: str) -> None:
    """End at once on Ctrl-C until `command_line.run` takes over: nothing has begun, and a trace of imports is noise."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless a shell has made it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    import_module("vitscale.cli.command_line").run(import_module(f"vitscale.cli.{module}").app)
