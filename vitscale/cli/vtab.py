"""`vitscale vtab`: datasets of VTAB-1k's 19 tasks from local copies, and what is missing for them."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Prepare VTAB-1k from local copies of its datasets.", no_args_is_help=True, rich_markup_mode=None
)

Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task", metavar="NAME", help="Only this task; `vitscale vtab doctor` lists them.", show_default="all"
    ),
]


@app.command(short_help="Make datasets of all tasks whose images are found.")
def prepare(
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDER...", help="Folders to search for copies: see docs/vtab.md.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the tasks' datasets.")],
    tasks: Tasks = None,
    ids: Annotated[
        Path | None,
        typer.Option(help="Take exactly these images: an ids.json, or a folder of TASK/ids.json.", metavar="PATH"),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one per core")] = None,
) -> None:
    """Make datasets of all tasks whose images are found, and say what is missing. Repeat the command to continue.

    A task asked for by --task that is missing, or one that fails, is exit code 3.
    """
    from vitscale.cli.vtab_output import run_prepare

    run_prepare([Path(folder) for folder in folders], out, tasks or [], ids, workers)


@app.command(short_help="List the tasks: prepared, found or still to be had.")
def doctor(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[FOLDER...]", help="With copies, or with what `prepare` made.")
    ] = None,
    tasks: Tasks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the tasks: which are prepared and in order, which are found, and where the others are to be had."""
    from vitscale.cli.vtab_output import show_tasks

    show_tasks([Path(folder) for folder in folders or []], tasks or [], as_json)
