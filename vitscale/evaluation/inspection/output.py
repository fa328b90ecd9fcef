"""Writes an inspection: each figure as PNG and SVG, its numbers as CSV, a page of all, and a file for other pages.

Equal findings give equal bytes: the files contain no dates and no paths.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from vitscale.evaluation.inspection.figures import InspectionFigure
from vitscale.ground.page import Facts, Figures, NumberedDrawing, Part, Section, Text, page_text, write_figures
from vitscale.ground.wording import finite

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
    drawn = []
    for figure in figures:
        about, numbers = (figure.key, figure.title, figure.caption), (list(figure.columns), finite(figure.rows))
        drawn.append(NumberedDrawing(*about, *numbers, figure.drawing.svg, figure.width))
        for form in ("png", "svg"):
            figure.save(folder / f"{figure.key}.{form}")
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([figure.columns, *figure.rows])
        (folder / f"{figure.key}.csv").write_text(text.getvalue(), encoding="utf-8")
    said: list[Part] = [Facts(facts), *(Text(note, "note") for note in notes)]
    shown = [Section(each.title, [each.drawing]) for each in drawn]
    page = page_text(title, subtitle, [Section("What was looked at", said), *shown])
    (folder / PAGE).write_text(page, encoding="utf-8")
    write_figures(folder, Figures(title, list(facts), list(notes), drawn))
