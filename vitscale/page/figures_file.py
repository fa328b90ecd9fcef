"""Reads and writes figures.json: what one command has drawn, with its numbers, for the page of another."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pydantic

from vitscale.errors import DataError, RecipeError
from vitscale.page.drawing import Drawing
from vitscale.storage import read_bytes
from vitscale.wording import describe_mistake

FIGURES_FILE = "figures.json"
_VERSION = 1
_ID = re.compile(r'\bid="|\bhref="#|url\(#')


@dataclass(frozen=True)
class NumberedDrawing:
    """A `Drawing` and its numbers, as rows of named columns. A number that is not finite is None.

    Attributes:
        key: the figure's name in files.
        title: what it shows, in words.
        svg, width, caption: as in `Drawing`.
    """

    key: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[str | int | float | None]]
    svg: str
    width: int

    @property
    def drawing(self) -> Drawing:
        """The drawing, for a page."""
        return Drawing(self.svg, self.title, self.width, self.caption)

    def under(self, name: str) -> "NumberedDrawing":
        """The same with ids that begin with `name`, so that a page can have several of one key."""
        return replace(self, svg=_ID.sub(lambda found: f"{found[0]}{name}-", self.svg))


@dataclass(frozen=True)
class Figures:
    """What a command has drawn.

    Attributes:
        title: the title of the page that it was drawn for.
        facts: names, with what is known about each.
        notes: what else should be said.
        figures: the figures, in order.
    """

    title: str
    facts: list[tuple[str, str]]
    notes: list[str]
    figures: list[NumberedDrawing]
    version: int = field(default=_VERSION)


_FIGURES = pydantic.TypeAdapter(Figures)


def finite_rows(rows: Sequence[Sequence[str | int | float]]) -> list[list[str | int | float | None]]:
    """Rows of a figure as `NumberedDrawing` has them."""
    return [[None if isinstance(value, float) and not math.isfinite(value) else value for value in row] for row in rows]


def write_figures(folder: Path, figures: Figures) -> None:
    """Write the file into a folder that exists. Raises OSError."""
    content = json.dumps(asdict(figures), indent=1, allow_nan=False)
    (folder / FIGURES_FILE).write_text(content + "\n", encoding="utf-8")


def read_figures(folder: Path) -> Figures:
    """Read what was written into a folder. Raises `RecipeError` if there is none, `DataError` if it is damaged."""
    path = folder / FIGURES_FILE
    try:
        found = _FIGURES.validate_json(read_bytes(path), strict=True)
        if found.version != _VERSION:
            raise ValueError(f"version {found.version}; this vitscale reads {_VERSION}")
        for each in found.figures:
            if ElementTree.fromstring(each.svg).tag != "svg":
                raise ValueError(f"{each.key} is no drawing")
    except (FileNotFoundError, NotADirectoryError):
        raise RecipeError(f"{folder}: has no {FIGURES_FILE}, which `vitscale inspect --out` writes") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as error:
        raise DataError(f"{path}: damaged: {describe_mistake(error.errors()[0])}") from None
    except (ValueError, ElementTree.ParseError) as error:
        raise DataError(f"{path}: damaged: {error}") from None
    return found
