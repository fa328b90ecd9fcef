"""The three installed commands. Imports next to nothing, so that Ctrl-C is under control while the rest is imported."""

import os
import signal

from vitscale.ground.errors import EXIT_INTERRUPTED


def vitscale() -> None:
    """`vitscale`."""
    _end_at_once_on_ctrl_c()
    from vitscale.cli.main import main

    main()


def convert() -> None:
    """`vitscale-convert`."""
    _end_at_once_on_ctrl_c()
    from vitscale.cli.convert import main

    main()


def flops() -> None:
    """`vitscale-flops`."""
    _end_at_once_on_ctrl_c()
    from vitscale.cli.flops import main

    main()


def _end_at_once_on_ctrl_c() -> None:
    """End on Ctrl-C until `command_line.run` takes over: nothing has begun, and a trace of imports helps nobody."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless a shell has made it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
