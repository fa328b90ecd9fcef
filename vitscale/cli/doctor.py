"""`vitscale doctor`: the command line of vitscale.about.doctor."""

from pathlib import Path
from typing import Annotated

from typer import Exit, Option


def doctor(
    folder: Annotated[Path, Option(help="Folder that runs will be written to.")] = Path("runs"),
    as_json: Annotated[bool, Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Say what this machine has, what would stop or slow a run, and how to mend it.

    Ends with 0, or with 2 where something would stop runs.
    """
    from vitscale.about.doctor import examine
    from vitscale.ground.errors import RecipeError
    from vitscale.ground.safe_text import printable
    from vitscale.ground.table import Column, Console, ResultTable, render

    with Console(stderr=True).status("looking"):  # seen on a terminal only
        findings = list(examine(folder))
    columns = [
        Column("state", "", is_text=True, style=lambda state: {"stops": "red", "slows": "yellow"}.get(state, "")),
        Column("what", "what", is_text=True),
        Column("found", "found", printable, is_text=True, folds=True),
        Column("mend", "what to do", printable, is_text=True, folds=True),
    ]
    rows = [{**vars(finding), "mend": finding.mend or None} for finding in findings]
    render(ResultTable(columns, rows), "json" if as_json else "table")
    if any(finding.state == "stops" for finding in findings):
        raise Exit(RecipeError.exit_code)
