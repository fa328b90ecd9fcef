"""What runs have cost so far, by their own records."""

from collections.abc import Sequence

from vitscale.flops.accounting import cost_row
from vitscale.flops.accounting import mfu as model_flops_utilisation
from vitscale.flops.hardware import Device
from vitscale.flops.reports import energy_legend
from vitscale.flops.work import recipe_work
from vitscale.ground.errors import DataError
from vitscale.ground.table import Column, ResultTable, Row, hours, number, percent
from vitscale.runs.names import METRICS_FILE
from vitscale.runs.run import Cost, Run

_COLUMNS = (
    Column("run", "run", is_text=True),
    Column("finished", "done", lambda done: "yes" if done else "no", is_text=True, spare=6),
    Column("step", "step", number(0)),
    Column("total_steps", "of", number(0), spare=5),
    Column("images", "images", number(0), spare=3),
    Column("exaflops", "exaFLOPs", number(3)),
    Column("images_per_s", "images/s", number(1)),
    Column("mfu", "MFU", percent(1)),
    Column("devices", "devices", number(0), spare=4),
    Column("hours", "hours", hours),
    Column("device_hours", "device\nhours", hours, spare=2),
    Column("energy_kwh", "kWh", number(1), spare=1),
    Column("cost", "cost", number(2)),
)
_HOURS_SAY = "Hours and images/s: of training steps alone, without evaluation, checkpoints and steps that a crash lost."


def runs_table(runs: Sequence[Run], device: Device | None, count: int | None, price: float | None) -> ResultTable:
    """What runs have cost so far, on as many devices as their records say; `count` overrides that.

    Raises `DataError` for a run that has not taken a step yet.
    """
    rows: list[Row] = []
    notes: list[str] = []
    for run in runs:
        cost = run.cost
        if cost is None:
            raise DataError(f"{run.directory}: {METRICS_FILE} has no training step yet")
        device_seconds = cost.device_seconds if count is None else cost.seconds * count
        mfu = cost.mfu or _mfu(run, cost.images, device, device_seconds)
        rows.append(
            {
                "run": str(run.directory),
                "finished": run.is_done,
                "step": cost.step,
                "total_steps": run.total_steps,
                "images": cost.images,
                "exaflops": cost.exaflops,
                "images_per_s": cost.images_per_s,
                "mfu": mfu,
                "devices": count or cost.world_size,
                **cost_row(
                    cost.seconds / 3600, None if device_seconds is None else device_seconds / 3600, device, price
                ),
            }
        )
        notes += [f"{run.directory}: {note}" for note in run.notes]
        if count is None:
            notes += _device_notes(run, cost)
        if mfu is None:
            notes.append(f"{run.directory}: no MFU: {_no_mfu(run, device)}")
    return ResultTable(_COLUMNS, rows, [_HOURS_SAY, *energy_legend(device)], notes)


def _device_notes(run: Run, cost: Cost) -> list[str]:
    notes = []
    if cost.device_seconds is None:
        notes.append(f"{run.directory}: without a checkpoint nothing tells on how many devices; say --devices N")
    if cost.is_world_size_assumed:
        notes.append(
            f"{run.directory}: not all metrics tell on how many devices; where they do not, as many as the newest "
            f"checkpoint says"
        )
    if len(cost.world_sizes) > 1:
        sizes = " and ".join(f"{size:,}" for size in cost.world_sizes)
        notes.append(f"{run.directory}: ran on {sizes} devices; device-hours are summed over all steps")
    return notes


def _mfu(run: Run, images: int, device: Device | None, device_seconds: float | None) -> float | None:
    """MFU if the metrics have none: from images a device-second, on the device that the user names."""
    num_classes = run.recipe.model.num_classes or (None if run.index is None else run.index.num_classes)
    if device is None or device_seconds is None or not num_classes or run.recipe.precision not in device.peak:
        return None
    macs = recipe_work(run.recipe, num_classes).macs
    return model_flops_utilisation(images / device_seconds, macs, 1, device.training_peak[0])


def _no_mfu(run: Run, device: Device | None) -> str:
    if device is None:
        return "the metrics have none, the device being unknown or the precision fp32; name it with --hardware"
    if run.recipe.precision not in device.peak:
        return f"the run computes in {run.recipe.precision}, of which the peak of {device.name} is not known"
    return "without a checkpoint nothing tells devices or classes"
