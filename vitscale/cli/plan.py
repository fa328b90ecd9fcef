"""`vitscale plan`: the command line of vitscale.about.planning.plan."""

from pathlib import Path
from typing import Annotated

import typer

_MOST = 2**20  # devices
_GB = 1e9
# For values that the ranges below let through: NaN.
_POSITIVE = "expected a number above 0, at most 1e9"


def plan(
    recipe: Annotated[str, typer.Argument(help="A file, or the stem of one that comes with vitscale.")],
    devices: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of devices on all nodes.")],
    hardware: Annotated[str, typer.Option(metavar="NAME", help="h100, h200, a100-pcie, ...")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's field.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=_MOST, help="Number of nodes.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Devices per node, instead of --nodes.")
    ] = None,
    network: Annotated[float | None, typer.Option(metavar="GB/s", help="Bandwidth from a node to the others.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Memory of one device.")] = None,
    mfu: Annotated[
        float | None, typer.Option(metavar="FRACTION", help="Share of their peak that devices reach while computing.")
    ] = None,
    storage: Annotated[
        float | None, typer.Option(metavar="GB/s", help="Rate at which all nodes together write checkpoints.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=2**53, help="Number of training samples, if there is no dataset.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one device for one hour.")] = None,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between two failures of one node.")
    ] = None,
    restart: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --mtbf: time from a failure to the next step.")
    ] = None,
    restart_of: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Instead of --restart: a run whose restarts are measured.")
    ] = None,
    repair: Annotated[
        float | None, typer.Option(metavar="HOURS", help="With --mtbf: time until a failed node is usable again.")
    ] = None,
    every_micro_batch: Annotated[
        bool, typer.Option("--all", help="Show every micro-batch, not the best one of each stage and recomputation.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every micro-batch.")] = False,
) -> None:
    """Say what a recipe needs on a cluster: memory, traffic, time.

    By every ZeRO stage, recomputation and micro-batch; on paper, nothing is run.
    """
    from vitscale.cli.plan_output import show_plan
    from vitscale.flops.estimate import estimate
    from vitscale.flops.hardware import find_device
    from vitscale.flops.reports import check_known
    from vitscale.ground.errors import RecipeError
    from vitscale.ground.table import Console
    from vitscale.recipe import load_recipe

    for option, value in {"--network": network, "--memory": memory, "--storage": storage, "--mtbf": mtbf}.items():
        if value is not None and not 0 < value <= 1e9:
            raise RecipeError(f"{option} {value:g}: {_POSITIVE}")
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
        )
        made = make_plan(
            estimated,
            cluster,
            price=price,
            storage=None if storage is None else storage * _GB,
            failures=None if mtbf is None else make_failures(cluster.nodes, mtbf, restart, repair, restarts),
        )
    show_plan(made, every_micro_batch=every_micro_batch, as_json=as_json)


def _restarts(run: Path, *, is_asked: bool) -> list[float]:
    """The seconds that each restart of a run took. Raises `RecipeError` if it had none, or they would not be used."""
    from vitscale.ground.errors import RecipeError
    from vitscale.runs.restarts import restart_times

    if not is_asked:
        raise RecipeError("--restart-of needs --mtbf HOURS, and replaces --restart")
    if found := restart_times(run):
        return found
    raise RecipeError(f"--restart-of {run}: no launch there has restarted it and come to another step; say --restart")
