"""What runs have cost so far, by their own records."""

from collections.abc import Sequence

from vitscale.flops.accounting import cost_row
from vitscale.flops.hardware import Device
from vitscale.flops.reports import COST, energy_legend
from vitscale.ground.errors import DataError
from vitscale.ground.table import Column, ResultTable, Row, number, percent
from vitscale.runs.names import METRICS_FILE
from vitscale.runs.run import Run

_COLUMNS = (
    Column("run", "run", is_text=True),
    Column("step", "step", number(0)),
    Column("total_steps", "of", number(0), spare=5),
    Column("images", "images", number(0), spare=3),
    Column("exaflops", "exaFLOPs", number(3)),
    Column("images_per_s", "images/s", number(1)),
    Column("mfu", "MFU", percent(1)),
    Column("devices", "devices", number(0), spare=4),
    *COST,
)
_HOURS_SAY = "Hours and images/s: of training steps alone, without evaluation, checkpoints and steps that a crash lost."


def runs_table(runs: Sequence[Run], device: Device | None, price: float | None) -> ResultTable:
    """What runs have cost so far, on as many devices as their records say; energy and price if the device is named.

    Raises `DataError` for a run that has not taken a step yet.
    """
    rows: list[Row] = []
    for run in runs:
        cost = run.cost
        if cost is None:
            raise DataError(f"{run.directory}: {METRICS_FILE} has no training step yet")
        row = {"run": str(run.directory), "step": cost.step, "total_steps": run.total_steps, "images": cost.images}
        row |= {"exaflops": cost.exaflops, "images_per_s": cost.images_per_s, "mfu": cost.mfu}
        device_hours = None if cost.device_seconds is None else cost.device_seconds / 3600
        row |= {"devices": cost.world_size, **cost_row(cost.seconds / 3600, device_hours, device, price)}
        rows.append(row)
    notes = [f"{run.directory}: {note}" for run in runs for note in run.notes]
    return ResultTable(_COLUMNS, rows, [_HOURS_SAY, *energy_legend(device)], notes)
