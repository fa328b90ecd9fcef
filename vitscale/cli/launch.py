"""`vitscale launch`: the command line of vitscale.launch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Resume = Literal["auto", "never"]


def launch(
    recipe: Annotated[str, typer.Argument(help="A file, or the stem of one that comes with vitscale.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes a node.", show_default="one a CUDA device; one on CPUs"),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65536,
            help="Machines: this command runs on each of them. Under srun, this and the next two come from Slurm.",
            show_default="1",
        ),
    ] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, max=65535, help="Of this node, from 0.")] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Node 0, as the others reach it; the port (default 29600) has to be free there."
        ),
    ] = None,
    wait_for_nodes: Annotated[
        float,
        typer.Option(min=0.01, max=10**6, metavar="MINUTES", help="For those that are not there (yet, or again)."),
    ] = 10.0,
    run_dir: Annotated[Path | None, typer.Option(help="Of the run.", show_default="runs/<recipe stem>")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's field.")
    ] = None,
    resume: Annotated[
        Resume, typer.Option(help="never: refuse a directory that holds a run, instead of continuing it.")
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option(min=0, max=10**6, help="In a row, without a new checkpoint in between.")
    ] = 3,
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, max=10**6, metavar="MINUTES", help="Save and end (85) after that.")
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option(min=1, max=2**53, metavar="STEP", help="Save and end after this step.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A small model of the family, four steps, generated pictures.")
    ] = False,
) -> None:
    """Pre-train a recipe on this machine, and start again when something fails. Repeating the command continues."""
    from vitscale.launch import Pretraining, find_place, launch_pretraining

    what = Pretraining(
        recipe,
        tuple(settings or ()),
        run_dir,
        ranks,
        resume,
        time_limit_minutes=time_limit,
        stop_at=stop_at,
        smoke=smoke,
    )
    place = find_place(nodes, node_rank, master, wait_s=60 * wait_for_nodes)
    raise typer.Exit(launch_pretraining(what, place, max_restarts=max_restarts))
