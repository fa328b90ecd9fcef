"""What `vitscale study plan` prints."""

import json
from dataclasses import asdict
from pathlib import Path

from vitscale.about.studies.expansion import expand
from vitscale.about.studies.reading import find_study, load_study
from vitscale.flops.hardware import find_device
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Column, Console, ResultTable, hours, number, render, short
from vitscale.ground.wording import counted

_COLUMNS = (
    Column("part", "part", is_text=True),
    Column("entries", "entries", number(0)),
    Column("exaflops", "exaFLOPs", short),
    Column("device_hours", "device-hours", short),
)
_ON_PAPER = (
    "On paper: hours of training alone, without evaluations and interruptions; `vitscale plan` tells more of a recipe."
)


def show_cost(
    study: str,
    hardware: str,
    devices: int,
    slots: int,
    *,
    samples: int | None,
    price: float | None,
    mfu: float | None,
    settings: list[str],
    as_json: bool,
) -> None:
    """Print what a study costs. Raises `RecipeError`."""
    if devices % slots:
        raise RecipeError(f"--slots {slots}: does not divide --devices {devices}")
    if price is not None and not 0 <= price <= 1e9:  # a NaN is in typer's range
        raise RecipeError(f"--price {price:g}: expected the price of one device-hour from 0 to 1e9")
    if mfu is not None and not 0 < mfu <= 1:
        raise RecipeError(f"--mfu {mfu:g}: expected a fraction above 0, at most 1")
    device = find_device(hardware)
    file = find_study(study)
    loaded = load_study(file)
    expansion = expand(loaded, Path("runs") / file.stem, settings, file.parent)
    with Console(stderr=True).status("planning, which takes some seconds") as status:  # seen on a terminal only
        from vitscale.about.planning.cluster import make_cluster  # torch takes seconds
        from vitscale.about.studies.cost import cost_of

        cluster = make_cluster(device, devices // slots, efficiency=mfu)
        cost = cost_of(loaded, expansion, cluster, slots, samples=samples, price=price, say=status.update)
    if as_json:
        content = asdict(cost) | {"study": file.stem, "device": device.name, "devices": devices, "slots": slots}
        print(json.dumps(content, indent=1, allow_nan=False))
        return
    print(
        f"{file.stem}: {counted(len(cost.entries), 'run')} on {devices:,} {device.name}, "
        f"{slots:,} at a time on {devices // slots:,} each\n"
    )
    rows = []
    for part in loaded.parts:
        of_part = [one for one in cost.entries if expansion.entries[one.name].part == part]
        sums = {key: sum(getattr(one, key) or 0.0 for one in of_part) or None for key in ("exaflops", "device_hours")}
        rows.append({"part": part, "entries": len(of_part), **sums})
    render(ResultTable(_COLUMNS, rows), "table")
    parts = [f"{short(cost.exaflops)} exaFLOPs", f"{hours(cost.hours)} hours", f"{cost.device_hours:,.0f} device-hours"]
    if cost.energy_kwh is not None:
        parts.append(f"at most {cost.energy_kwh:,.0f} kWh")
    if cost.cost is not None:
        parts.append(f"price {cost.cost:,.0f}")
    at_least = "at least " if cost.unknown else ""
    print(f"whole study     {at_least}{', '.join(parts)}")
    if cost.branches:
        whole = cost.exaflops + cost.saved_exaflops
        print(
            f"branches        {counted(len(cost.branches), 'run')} from a step of another's, which saves "
            f"{short(cost.saved_exaflops)} exaFLOPs, {cost.saved_exaflops / whole:.1%} of {short(whole)}"
        )
    if cost.unknown:
        first = cost.unknown[0]
        print(f"not counted     {counted(len(cost.unknown), 'run')}, the first {first.name}: {first.problem}")
    print("\nAssumed:")
    for assumption in cost.assumptions:
        print(f"  {assumption}")
    print(f"\n{_ON_PAPER}")
