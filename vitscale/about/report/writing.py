"""Writes a report: the page and results.json, each complete or absent."""

import json
from pathlib import Path

from vitscale.about.report.content import KIND, Report
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import make_folder, remove_leftovers, write_text
from vitscale.runs.names import RECIPE_FILE
from vitscale.runs.reading import read_object

PAGE_FILE = "index.html"
RESULTS_FILE = "results.json"


def check_folder(folder: Path) -> None:
    """Raise `RecipeError` for a folder that holds something other than a report: no other results are overwritten."""
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"--out {folder}: is a file; expected a folder")
        if (folder / RECIPE_FILE).exists():
            raise RecipeError(f"--out {folder}: is a run's directory; choose another folder")
        there = [name for name in (PAGE_FILE, RESULTS_FILE) if (folder / name).exists()]
    except OSError as error:
        raise RecipeError(f"--out {str(folder)[:100]}: {error.strerror}") from None
    if there and (read_object(folder / RESULTS_FILE) or {}).get("kind") != KIND:
        raise RecipeError(f"--out {folder}: contains {there[0]}, which no report wrote; choose another folder")


def write_report(folder: Path, report: Report, page: str) -> None:
    """Write both files; an earlier report is replaced. Raises `RecipeError` as `check_folder`, and `DataError`."""
    check_folder(folder)
    try:
        make_folder(folder)
        remove_leftovers(folder)
        write_text(folder / RESULTS_FILE, json.dumps(report.plain(), indent=1, allow_nan=False) + "\n")
        write_text(folder / PAGE_FILE, page)
    except OSError as error:
        raise DataError(f"--out {folder}: cannot be written: {error.strerror}") from None
