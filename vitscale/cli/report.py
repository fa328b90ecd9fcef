"""`vitscale report`: the command line of vitscale.report."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RUN...|STUDY", help="Directories of runs, or the folder of a study.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The page and results.json go there.")],
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default="the study's or runs' names")] = None,
) -> None:
    """Put the results of runs or a study on one page.

    From it every claim can be checked: results beside the paper's, curves, compute, what decided, de-duplication, data,
    versions and recipes.
    """
    from vitscale.page import check_drawing
    from vitscale.report import PAGE_FILE, gather, page, write_report
    from vitscale.report.writing import check_folder

    check_drawing("vitscale report")
    check_folder(out)
    content = gather(sources, title)
    write_report(out, content, page(content))
    print(out / PAGE_FILE)
