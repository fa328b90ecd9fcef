"""`vitscale status`: the command line of vitscale.about.status."""

from typing import Annotated

import typer

_MOST = 1e9


def status(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Look again every 2 s, from before a run begins until all are done. On a terminal the figures stay in "
            "place; elsewhere a line (with --json an object) is printed when a run has got on.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each run.")] = False,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="h200, a100, ...: for energy, and MFU where it was not logged.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, max=_MOST, help="Price of one device for one hour.")] = None,
) -> None:
    """Say how runs are doing: step, loss, speed, time left, cost.

    Also checkpoints, restarts, and whether they are alive.
    """
    from vitscale.about.status import RunReader
    from vitscale.cli.status_output import show_status, watch_status
    from vitscale.flops.hardware import find_device
    from vitscale.ground.errors import RecipeError

    if price is not None and not 0 <= price <= _MOST:  # a NaN is in typer's range
        raise RecipeError(f"--price {price:g}: expected the price of one device-hour from 0 to {_MOST:g}")
    device = None if hardware is None else find_device(hardware)
    readers = {run: RunReader(run, device, price) for run in runs}
    if watch:
        watch_status(readers, as_json)
    else:
        show_status(readers, as_json)
