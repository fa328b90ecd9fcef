"""Writes an inspection: each figure as PNG and SVG, its numbers as CSV, and a page of all.

Equal findings give equal bytes: the files contain no dates and no paths.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from vitscale.evaluation.inspection.figures import InspectionFigure
from vitscale.ground.page import Facts, Part, Section, Text, page_text

PAGE = "index.html"


def write(
    folder: Path,
    figures: Sequence[InspectionFigure],
    title: str,
    subtitle: str,
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
) -> None:
    """Write all figures and the page into a folder that exists. Raises OSError."""
    for figure in figures:
        for form in ("png", "svg"):
            figure.save(folder / f"{figure.key}.{form}")
        with (folder / f"{figure.key}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([figure.columns, *figure.rows])
    said: list[Part] = [Facts(facts), *(Text(note, "note") for note in notes)]
    shown = [Section(figure.title, [figure.drawing]) for figure in figures]
    page = page_text(title, subtitle, [Section("What was looked at", said), *shown])
    (folder / PAGE).write_text(page, encoding="utf-8")
