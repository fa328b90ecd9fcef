"""`vitscale plan`: what a recipe needs on a cluster, on paper."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vitscale.cli.options import Hardware, Mfu, Settings
from vitscale.flops.estimate import estimate
from vitscale.flops.hardware import find_device
from vitscale.flops.reports import check_known
from vitscale.ground.errors import RecipeError
from vitscale.ground.table import Column, Console, ResultTable, Row, hanging, number, percent, render, short
from vitscale.ground.wording import counted
from vitscale.recipe import load_recipe
from vitscale.runs.run import restart_times

if TYPE_CHECKING:
    from vitscale.about.planning.cluster import Cluster
    from vitscale.about.planning.plan import Choice, ClusterPlan, Goodput, Totals

_MOST = 2**20  # devices
_GB = 1e9
_PARTS = ("weights", "optimizer", "ema", "gradients", "update", "activations", "workspace", "images")
_PARALLELISM = ("zero_stage", "overlap", "hpz_size", "activation_checkpointing")
_WORTH_SAYING = 0.01  # share of a step
_ON_PAPER = (
    "On paper: vitscale was never measured on several of these devices. Memory and bytes follow from what DeepSpeed "
    "was seen to hold and send on 2 and 4 ranks; times, and how they scale to 8, 64 or 512 devices, are arithmetic."
)


def plan(
    recipe: Annotated[str, Argument(help="A file, or the stem of one that comes with vitscale.")],
    devices: Annotated[int, Option(min=1, max=_MOST, help="Number of devices on all nodes.")],
    hardware: Hardware,
    settings: Settings = None,
    nodes: Annotated[int | None, Option(min=1, max=_MOST, help="Number of nodes.")] = None,
    devices_per_node: Annotated[
        int | None, Option(min=1, max=_MOST, help="Devices per node, instead of --nodes.")
    ] = None,
    network: Annotated[float | None, Option(metavar="GB/s", help="Bandwidth from a node to the others.")] = None,
    memory: Annotated[float | None, Option(metavar="GB", help="Memory of one device.")] = None,
    mfu: Mfu = None,
    storage: Annotated[
        float | None, Option(metavar="GB/s", help="Rate at which all nodes together write checkpoints.")
    ] = None,
    samples: Annotated[
        int | None, Option(min=1, max=2**53, help="Number of training samples, if there is no dataset.")
    ] = None,
    price: Annotated[float | None, Option(help="Price of one device for one hour.")] = None,
    mtbf: Annotated[float | None, Option(metavar="HOURS", help="Mean time between two failures of one node.")] = None,
    restart: Annotated[
        float | None, Option(metavar="SECONDS", help="With --mtbf: time from a failure to the next step.")
    ] = None,
    restart_of: Annotated[
        Path | None, Option(metavar="RUN", help="Instead of --restart: a run whose restarts are measured.")
    ] = None,
    repair: Annotated[
        float | None, Option(metavar="HOURS", help="With --mtbf: time until a failed node is usable again.")
    ] = None,
    every_micro_batch: Annotated[
        bool, Option("--all", help="Show every micro-batch, not the best one of each stage and recomputation.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, with every micro-batch.")] = False,
) -> None:
    """Say what a recipe needs on a cluster: memory, traffic, time.

    By every ZeRO stage, recomputation and micro-batch; on paper, nothing is run.
    """
    for option, value in {"--network": network, "--memory": memory, "--storage": storage, "--mtbf": mtbf}.items():
        if value is not None and not 0 < value <= 1e9:
            raise RecipeError(f"{option} {value:g}: expected a number above 0, at most 1e9")
    if price is not None and not 0 <= price <= 1e9:
        raise RecipeError(f"--price {price:g}: expected the price of one device-hour from 0 to 1e9")
    if mfu is not None and not 0 < mfu <= 1:
        percent = f"; {mfu:g} % is --mfu {mfu / 100:g}" if 1 < mfu <= 100 else ""
        raise RecipeError(f"--mfu {mfu:g}: expected a fraction above 0, at most 1{percent}")
    for option, value in {"--restart": restart, "--repair": repair}.items():
        if value is not None and mtbf is None:
            raise RecipeError(f"{option} has no effect without --mtbf HOURS")
        if value is not None and not 0 <= value <= 1e9:
            raise RecipeError(f"{option} {value:g}: expected a number from 0 to 1e9")
    restarts = [] if restart_of is None else _restarts(restart_of, is_asked=mtbf is not None and restart is None)
    device = find_device(hardware)
    estimated = estimate(Path(recipe).stem, load_recipe(recipe, settings or []), samples)
    if estimated.work is None:
        check_known(estimated)
    estimated.recipe.split(devices)  # before torch is imported, which takes seconds

    with Console(stderr=True).status("planning, which takes some seconds"):  # seen on a terminal only
        from vitscale.about.planning.cluster import make_cluster
        from vitscale.about.planning.failures import make_failures
        from vitscale.about.planning.plan import make_plan

        cluster = make_cluster(
            device,
            devices,
            nodes=nodes,
            devices_per_node=devices_per_node,
            network=None if network is None else network * _GB,
            memory=None if memory is None else memory * _GB,
            efficiency=mfu,
            storage=None if storage is None else storage * _GB,
            price=price,
        )
        failures = None if mtbf is None else make_failures(cluster.nodes, mtbf, restart, repair, restarts)
        made = make_plan(estimated, cluster, failures)
    if as_json:
        print(json.dumps(_as_data(made), indent=1, allow_nan=False))
        return
    print(_heading(made), end="\n\n")
    render(_table(made, made.choices if every_micro_batch else _shortlist(made)), "table")
    best = made.best
    if best is None or made.totals is None:
        print("Nothing fits. More devices, stage 3, parallelism.offload=optimizer or a smaller model may.")
    else:
        chosen, *lines = _of_the_best(made.totals, made.cluster, best)
        print(chosen)  # to be copied: one line
        for line in [*lines, *([] if made.goodput is None else _of_failures(made.totals, made.goodput))]:
            print(line[:16] + hanging(line[16:], 16))
    print("\nAssumed:")
    for assumption in made.assumptions:
        print(f"  {hanging(assumption, 4)}")
    print(f"\n{hanging(_ON_PAPER, 0)}")


def _restarts(run: Path, *, is_asked: bool) -> list[float]:
    """The seconds that each restart of a run took. Raises `RecipeError` if it had none, or they would not be used."""
    if not is_asked:
        raise RecipeError("--restart-of needs --mtbf HOURS, and replaces --restart")
    if found := restart_times(run):
        return found
    raise RecipeError(f"--restart-of {run}: no launch there has restarted it and come to another step; say --restart")


def _heading(plan: "ClusterPlan") -> str:
    cluster = plan.cluster
    nodes = f"{counted(cluster.nodes, 'node')} of {cluster.devices_per_node}"
    network = f", {cluster.network / _GB:g} GB/s a node" if cluster.nodes > 1 else ""
    return (
        f"{plan.name}: {plan.parameters / 1e6:,.0f} million parameters on {cluster.devices:,} {cluster.device.name} "
        f"({nodes}, {cluster.memory / _GB:g} GB each{network})"
    )


def _shortlist(plan: "ClusterPlan") -> list["Choice"]:
    """The best micro-batch for each way to send and recomputation; the smallest in memory if none fits."""
    from vitscale.about.planning.plan import find_best

    kept = []
    for _, group in groupby(plan.choices, key=lambda one: (one.way_to_send, one.parallelism.activation_checkpointing)):
        sizes = list(group)
        marked = next((one for one in sizes if one.is_best), None)
        kept.append(marked or find_best(sizes) or min(sizes, key=lambda one: one.memory.device_bytes))
    return kept


# ---- The table -------------------------------------------------------------------------------------------------------


def _giga(value: float) -> str:
    return f"{value / _GB:,.1f}"


_COLUMNS = (
    Column("zero_stage", "ZeRO"),
    Column("overlap", "overlap"),
    Column("hpz_size", "hpz\nsize"),
    Column("activation_checkpointing", "recompute\nevery"),
    Column("micro_batch", "micro\nbatch"),
    Column("accumulation", "x"),
    Column("memory_bytes", "memory\nGB", _giga),
    Column("weights", "weights", _giga, spare=4),
    Column("optimizer", "optimizer", _giga, spare=4),
    Column("ema", "ema", _giga, spare=4),
    Column("gradients", "gradients", _giga, spare=4),
    Column("update", "update", _giga, spare=5),
    Column("activations", "activations", _giga, spare=4),
    Column("workspace", "workspace", _giga, spare=4),
    Column("sent_bytes", "sent a step\nGB", _giga, spare=2),
    Column("step_s", "step\ns", number(3)),
    Column("waiting_s", "of it\nwaiting", number(3), spare=3),
    Column("images_per_s", "images/s", number(0), spare=2),
    Column("mfu", "MFU", percent(1), spare=1),
    Column("verdict", "", is_text=True),
)
_LEGEND = (
    "GB are 10^9 bytes of one device; update and workspace are what comes on top at the two peaks of a step, of which "
    "memory is the higher one. Sent: by each device, in a ring.",
)


def _table(plan: "ClusterPlan", choices: list["Choice"] | tuple["Choice", ...]) -> ResultTable:
    rows = [_row(plan.cluster, one) for one in choices]
    for row in rows:
        row["ema"] = row["ema"] or None  # a column of zeros says nothing
        row["overlap"] = "yes" if row["overlap"] else None
        row["hpz_size"] = row["hpz_size"] if row["hpz_size"] > 1 else None
    groups = [len(list(group)) for _, group in groupby(choices, key=lambda one: one.way_to_send)]
    return ResultTable(_COLUMNS, rows, legend=_LEGEND, groups=groups)


def _row(cluster: "Cluster", choice: "Choice") -> Row:
    return {
        **{key: getattr(choice.parallelism, key) for key in _PARALLELISM},
        "micro_batch": choice.micro_batch,
        "accumulation": choice.accumulation,
        "memory_bytes": choice.memory.device_bytes,
        **{part: getattr(choice.memory, part) for part in _PARTS},
        "host_bytes": choice.memory.host_bytes,
        "sent_bytes": sum(collective.sent(cluster.devices) for collective in choice.collectives),
        "step_s": choice.time.total,
        "waiting_s": choice.time.waiting,
        "images_per_s": choice.images_per_s,
        "mfu": choice.mfu,
        "fits": choice.fits,
        "verdict": choice.verdict,
    }


# ---- The best --------------------------------------------------------------------------------------------------------


def _of_the_best(totals: "Totals", cluster: "Cluster", best: "Choice") -> list[str]:
    time = best.time
    lines = [f"best            {' '.join(f'--set {setting}' for setting in best.settings())}"]
    parts = {
        "computing": time.compute,
        "again": time.recompute,
        "update": time.update,
        "waiting for the network": time.waiting,
    }
    shown = ", ".join(f"{name} {1000 * seconds:,.1f} ms" for name, seconds in parts.items() if seconds)
    lines.append(f"step            {time.total:.3g} s: {shown}")
    lines += [_of_network(row) for row in _sent(cluster, best) if row["seconds"] > _WORTH_SAYING * time.total]
    if totals.days is not None:
        lines.append(f"whole run       {_whole_run(totals)}")
    else:
        lines.append("whole run       not known: no dataset says how many samples an epoch has; --samples N")
    host = best.memory.host_bytes * cluster.devices_per_node / _GB
    lines.append(
        f"each node       {totals.loader_images_per_s:,.0f} images/s to decode, "
        f"{totals.storage_bytes_per_s / 1e6:,.0f} MB/s of storage, {host:,.0f} GB of host memory"
    )
    every = ""
    if totals.checkpoint_every_s:
        share = totals.stall_s / totals.checkpoint_every_s
        every = f" every {totals.checkpoint_every_s / 60:,.1f} minutes: {percent(2)(share)} of the time"
    lines.append(
        f"checkpoint      {totals.checkpoint_bytes / _GB:,.1f} GB, {short(totals.checkpoint_s)} s to write; "
        f"training waits {short(totals.stall_s)} s{every}"
    )
    return lines


def _sent(cluster: "Cluster", choice: "Choice") -> list[Row]:
    """A row per collective of a step: what it sends, in how many messages, by which algorithm, in what time."""
    from vitscale.about.planning.step_time import message_time

    rows = []
    for each in choice.collectives:
        one, count = message_time(each, cluster), each.times * each.messages
        rows.append(
            {
                "what": each.what,
                "kind": each.kind,
                "bytes": each.sent(cluster.devices),
                "messages": count,
                "algorithm": one.algorithm,
                "protocol": one.protocol,
                "seconds": count * one.total,
                "latency_s": count * one.latency,
            }
        )
    return rows


def _of_network(row: Row) -> str:
    return (
        f"network         {short(row['bytes'] / _GB)} GB a device: {row['kind']} of {row['what']}, "
        f"{counted(row['messages'], 'message')} by {row['algorithm']} ({row['protocol']}): "
        f"{1000 * row['seconds']:,.1f} ms, {1000 * row['latency_s']:,.1f} ms of it latencies"
    )


def _of_failures(totals: "Totals", goodput: "Goodput") -> list[str]:
    share = percent(1)
    best, now = goodput.by_spares[0], ""
    if goodput.useful is not None and totals.checkpoint_every_s is not None:
        now = f"; every {totals.checkpoint_every_s / 60:,.1f} minutes {share(goodput.useful)}"
    lines = [
        f"failures        one every {short(goodput.failure_every_s / 3600)} hours",
        f"useful time     {share(best.useful)} with a checkpoint every {goodput.best_every_s / 60:,.1f} minutes{now}; "
        f"--set checkpoint.every.steps={goodput.best_every_steps}",
    ]
    for row in goodput.by_spares:
        whole = "" if row.days is None else f", {short(row.days)} days"
        hours = "" if row.device_hours is None else f", {row.device_hours:,.0f} device-hours"
        lines.append(f"{counted(row.spares, 'spare node'):<15} {share(row.useful)}{whole}{hours}")
    return lines


def _whole_run(totals: "Totals") -> str:
    assert totals.days is not None and totals.exaflops is not None and totals.device_hours is not None
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
            "network_bytes_per_s": cluster.network,
            "link_bytes_per_s": cluster.link,
            "efficiency": cluster.efficiency,
        },
        "best": None if plan.best is None else plan.choices.index(plan.best),
        "choices": [
            {**_row(cluster, one), "time_s": asdict(one.time), "sent": _sent(cluster, one)} for one in plan.choices
        ],
        "totals": None if plan.totals is None else asdict(plan.totals),
        "goodput": None if plan.goodput is None else asdict(plan.goodput),
        "assumptions": list(plan.assumptions),
        "on_paper": _ON_PAPER,
    }
