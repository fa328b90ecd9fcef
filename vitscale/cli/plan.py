"""`vitscale plan`: what a recipe needs on a cluster, on paper."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vitscale.cli.options import Hardware, Mfu, Price, Settings, check_numbers
from vitscale.flops.estimate import estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.reports import check_known
from vitscale.ground.table import Column, Console, ResultTable, Row, hanging, render, short
from vitscale.ground.wording import counted
from vitscale.recipe import load_recipe

if TYPE_CHECKING:
    from vitscale.about.planning import Choice, ClusterPlan, Totals

_MOST = 2**20  # devices
_GB = 1e9
_PARTS = ("weights", "optimizer", "ema", "gradients", "update", "activations", "workspace", "images")
_ON_PAPER = (
    "On paper: memory follows from what DeepSpeed was seen to hold on a few ranks, never measured on these devices; "
    "time and price from the MFU alone. Take yours from some minutes of training (vitscale status) for --mfu."
)


def plan(
    recipe: Annotated[str, Argument(help="A file, or the name of one that comes with vitscale.")],
    devices: Annotated[int, Option(min=1, max=_MOST, help="Number of devices on all nodes.")],
    hardware: Hardware,
    settings: Settings = None,
    nodes: Annotated[int | None, Option(min=1, max=_MOST, help="Number of nodes.")] = None,
    memory: Annotated[float | None, Option(metavar="GB", help="Memory of one device.")] = None,
    mfu: Mfu = None,
    samples: Annotated[
        int | None, Option(min=1, max=2**53, help="Number of training samples, if there is no dataset.")
    ] = None,
    price: Price = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, with every micro-batch.")] = False,
) -> None:
    """Say what a recipe needs on a cluster: memory, and time and price at an MFU.

    By every ZeRO stage, recomputation and micro-batch; on paper, nothing is run.
    """
    check_numbers({"--memory": memory, "--mfu": mfu, "--price": price})
    device = find_device(hardware)
    estimated = estimate(Path(recipe).stem, load_recipe(recipe, settings or []), samples)
    if estimated.work is None:
        check_known(estimated)
    estimated.recipe.split(devices)  # before torch is imported, which takes seconds

    with Console(stderr=True).status("planning, which takes some seconds"):  # seen on a terminal only
        from vitscale.about.planning import make_cluster, make_plan

        size = None if memory is None else memory * _GB
        made = make_plan(estimated, make_cluster(device, devices, nodes=nodes, memory=size, mfu=mfu, price=price))
    if as_json:
        print(json.dumps(_as_data(made), indent=1, allow_nan=False))
        return
    print(_heading(made), end="\n\n")
    render(_table(_shortlist(made)), "table")
    best = made.best
    if best is None:
        print("Nothing fits. More devices, stage 3, parallelism.offload=optimizer or a smaller model may.")
    else:
        chosen = " ".join(f"--set {setting}" for setting in best.settings())
        print(f"best            {chosen}")  # to be copied: one line
    for name, text in _of_the_run(made, best).items():
        print(f"{name:<16}{hanging(text, 16)}")
    print("\nAssumed:")
    for assumption in made.assumptions:
        print(f"  {hanging(assumption, 4)}")
    print(f"\n{hanging(_ON_PAPER, 0)}")


def _heading(plan: "ClusterPlan") -> str:
    cluster = plan.cluster
    nodes = f"{counted(cluster.nodes, 'node')} of {cluster.devices_per_node}"
    return (
        f"{plan.name}: {plan.parameters / 1e6:,.0f} million parameters on {cluster.devices:,} {cluster.device.name} "
        f"({nodes}, {cluster.memory / _GB:g} GB each)"
    )


def _way(choice: "Choice") -> tuple[int, int]:
    return choice.parallelism.zero_stage, choice.parallelism.activation_checkpointing


def _shortlist(plan: "ClusterPlan") -> list["Choice"]:
    """The largest micro-batch that fits for each stage and recomputation; the smallest one if none does."""
    from vitscale.about.planning import find_best

    sizes = [list(group) for _, group in groupby(plan.choices, key=_way)]
    return [find_best(group) or group[0] for group in sizes]


def _giga(value: float) -> str:
    return f"{value / _GB:,.1f}"


_COLUMNS = (
    Column("zero_stage", "ZeRO"),
    Column("activation_checkpointing", "recompute\nevery"),
    Column("micro_batch", "micro\nbatch"),
    Column("accumulation", "x"),
    Column("memory_bytes", "memory\nGB", _giga),
    *(Column(part, part, _giga, spare=5 if part == "update" else 4) for part in _PARTS[:-1]),
    Column("verdict", "", is_text=True),
)
_LEGEND = (
    "GB are 10^9 bytes of one device; update and workspace are what comes on top at the two peaks of a step, of which "
    "memory is the higher one.",
)


def _table(choices: list["Choice"]) -> ResultTable:
    rows = [row | {"ema": row["ema"] or None} for row in map(_row, choices)]  # a column of zeros says nothing
    groups = [len(list(group)) for _, group in groupby(choices, key=lambda one: one.parallelism.zero_stage)]
    return ResultTable(_COLUMNS, rows, legend=_LEGEND, groups=groups)


def _row(choice: "Choice") -> Row:
    stage, every = _way(choice)
    return {
        "zero_stage": stage,
        "activation_checkpointing": every,
        "micro_batch": choice.micro_batch,
        "accumulation": choice.accumulation,
        "memory_bytes": choice.memory.device_bytes,
        **{part: getattr(choice.memory, part) for part in _PARTS},
        "host_bytes": choice.memory.host_bytes,
        "fits": choice.fits,
        "verdict": choice.verdict,
    }


def _of_the_run(plan: "ClusterPlan", best: "Choice | None") -> dict[str, str]:
    totals = plan.totals
    host = "" if best is None else f", {best.memory.host_bytes * plan.cluster.devices_per_node / _GB:,.0f} GB of memory"
    return {
        f"at {plan.cluster.mfu:.0%} MFU": f"{totals.images_per_s:,.0f} images/s: {_whole_run(totals)}",
        "each node": (
            f"{totals.loader_images_per_s:,.0f} images/s to decode, "
            f"{totals.storage_bytes_per_s / 1e6:,.0f} MB/s of storage{host}"
        ),
        "checkpoint": f"{totals.checkpoint_bytes / _GB:,.1f} GB",
    }


def _whole_run(totals: "Totals") -> str:
    if totals.days is None or totals.exaflops is None or totals.device_hours is None:
        return "for how long is not known: no dataset says how many samples an epoch has; --samples N"
    parts = [f"{short(totals.days)} days", f"{short(totals.exaflops)} exaFLOPs"]
    parts.append(f"{totals.device_hours:,.0f} device-hours")
    if totals.energy_kwh is not None:
        parts.append(f"at most {totals.energy_kwh:,.0f} kWh")
    if totals.cost is not None:
        parts.append(f"price {totals.cost:,.0f}")
    return ", ".join(parts)


def _as_data(plan: "ClusterPlan") -> dict[str, Any]:
    cluster = plan.cluster
    return {
        "recipe": plan.name,
        "parameters": plan.parameters,
        "cluster": {
            "device": cluster.device.name,
            "devices": cluster.devices,
            "nodes": cluster.nodes,
            "memory_bytes": cluster.memory,
            "mfu": cluster.mfu,
        },
        "best": None if plan.best is None else plan.choices.index(plan.best),
        "choices": [_row(one) for one in plan.choices],
        "totals": asdict(plan.totals),
        "assumptions": list(plan.assumptions),
        "on_paper": _ON_PAPER,
    }
