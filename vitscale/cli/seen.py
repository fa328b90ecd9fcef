"""`vitscale seen`: the command line of vitscale.about.checks.seen."""

from pathlib import Path
from typing import Annotated

import typer


def seen(
    samples: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|UID|LIST...", help="Images, folders, uids, lists of uids; - for a list."),
    ],
    run: Annotated[Path, typer.Option(metavar="RUN", help="A run's directory.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for the pixels that were seen, as PNG.")
    ] = None,
    near: Annotated[
        bool, typer.Option("--near", help="Find copies of the images, too, as `vitscale dedup` does: reads all data.")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
) -> None:
    """Say at which steps a run has seen an image, and with which crop."""
    from vitscale.cli.seen_output import show_seen

    show_seen(samples, run, out, root, near=near, as_json=as_json)
