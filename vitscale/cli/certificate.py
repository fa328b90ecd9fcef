"""`vitscale certificate`: the command line of vitscale.replay.certificate."""

from pathlib import Path
from typing import Annotated

import typer

from vitscale.errors import DataError


def certificate(
    run: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    report: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A report that goes with it.")] = None,
    root: Annotated[
        str | None, typer.Option("--data-root", metavar="DIR", help="Where the run's data are, if they were moved.")
    ] = None,
) -> None:
    """List all that a finished run's claims rest on, under one hash.

    RUN/certificate.json, and beside it the program that checks it, which needs Python alone.
    """
    from vitscale.replay.certificate import write_certificate

    if report is not None and not report.is_dir():
        raise DataError(f"--report {report}: there is no such folder")
    try:
        out, found = write_certificate(run, report, root)
    except OSError as error:
        raise DataError(f"{error.filename or run}: {error.strerror or error}") from None
    print(f"{out}: root {found}")
