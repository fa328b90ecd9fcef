"""`vitscale launch`: the command line of vitscale.launch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Resume = Literal["auto", "never"]


def launch(
    recipe: Annotated[str, typer.Argument(help="A file, or the stem of one that comes with vitscale.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes.", show_default="one a CUDA device; one on CPUs"),
    ] = None,
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
    from vitscale.launch import Pretraining, launch_pretraining

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
    raise typer.Exit(launch_pretraining(what, max_restarts=max_restarts))
