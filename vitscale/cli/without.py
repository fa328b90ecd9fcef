"""`vitscale without`: the command line of vitscale.about.checks.without."""

from pathlib import Path
from typing import Annotated

import typer


def without(
    samples: Annotated[
        list[str],
        typer.Argument(
            metavar="LIST|UID|IMAGE...", help="What to leave out: lists of uids, uids, images, folders; - for a list."
        ),
    ],
    run: Annotated[Path, typer.Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="New: for the dataset without them (a view) and the branch's recipe."),
    ] = None,
    near: Annotated[
        bool, typer.Option("--near", help="Copies of the images, too, as `vitscale dedup` finds them: reads all data.")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Go on without some images: from which step a run has to branch off that has not seen them, and what it costs.

    With --out, write the dataset without them and the recipe of the branch.
    """
    from vitscale.cli.without_output import show_without

    show_without(samples, run, out, root, near=near, as_json=as_json)
