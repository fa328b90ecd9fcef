"""`vitscale report`: the command line of vitscale.about.report."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def report(
    sources: Annotated[
        list[Path], Argument(metavar="RUN...|STUDY", help="Directories of runs, or the folder of a study.")
    ],
    out: Annotated[Path, Option("--out", "-o", metavar="FOLDER", help="Folder for the page and results.json.")],
    title: Annotated[str | None, Option(help="Title of the page.", show_default="the study's or runs' names")] = None,
) -> None:
    """Put the results of runs or a study on one page.

    From it every claim can be checked: results beside the paper's, curves, compute, what decided, de-duplication, data,
    versions and recipes.
    """
    from vitscale.about.report import PAGE_FILE, check_folder, gather, page, write_report
    from vitscale.ground.page import check_drawing

    check_drawing("vitscale report")
    check_folder(out)
    content = gather(sources, title)
    write_report(out, content, page(content))
    print(out / PAGE_FILE)
