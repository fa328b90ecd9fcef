"""Reads and writes figures.json: what one command has drawn, with its numbers, for the page of another."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pydantic

from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.page.drawing import Drawing
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import read_bytes
from vitscale.ground.wording import describe_mistake

FIGURES_FILE = "figures.json"
_VERSION = 1
_ID = re.compile(r'\bid="|\bhref="#|url\(#')
_MOST_BYTES, _MOST_DEPTH = 64 << 20, 40
# What matplotlib writes: attribute -> what its values may be. Nothing leads anywhere, moves, or leaves its place.
_ELEMENTS = {*("svg", "defs", "g", "path", "use", "text", "tspan", "image", "clipPath", "rect", "pattern")}
_NAME = r"[\w.:-]+"
_WORD = rf"(?:[\w\s.,#%+-]++|(?<=\bvar)\(--[\w-]+\)|(?<=\burl)\(#{_NAME}\))*+"
_PROPERTY = rf"\s*+(?:(?:fill|stroke|font|opacity)(?:-[a-z]+)*|text-anchor)\s*+:{_WORD}"
_VALUES = {
    "id": _NAME,
    "href": rf"#{_NAME}|data:image/png;base64,[\sA-Za-z0-9+/=]*",
    "style": rf"(?:{_PROPERTY};)*(?:{_PROPERTY})?\s*",
    "transform": r"(?:(?:translate|scale|rotate|matrix)\([\s\d.,e+-]*\)\s*)*",
    **dict.fromkeys(("d", "viewBox", "x", "y", "width", "height", "patternUnits", "clip-path"), _WORD),
    **dict.fromkeys(("fill", "stroke", "opacity", "fill-opacity", "stroke-opacity"), _WORD),
}


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


def write_figures(folder: Path, figures: Figures) -> None:
    """Write the file into a folder that exists. Raises OSError."""
    content = without_secrets(json.dumps(asdict(figures), indent=1, allow_nan=False))
    (folder / FIGURES_FILE).write_text(content + "\n", encoding="utf-8")


def read_figures(folder: Path) -> Figures:
    """Read what was written into a folder. Raises `RecipeError` if there is none, `DataError` if it is damaged."""
    path = folder / FIGURES_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
        found = _FIGURES.validate_json(read_bytes(path), strict=True)
        if found.version != _VERSION:
            raise ValueError(f"version {found.version}; this vitscale reads {_VERSION}")
        return replace(found, figures=[replace(each, svg=_checked(each.svg, each.key)) for each in found.figures])
    except (FileNotFoundError, NotADirectoryError):
        raise RecipeError(f"{folder}: has no {FIGURES_FILE}, which `vitscale inspect --out` writes") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except pydantic.ValidationError as error:
        raise DataError(f"{path}: damaged: {describe_mistake(error.errors()[0])}") from None
    except (ValueError, ElementTree.ParseError) as error:
        raise DataError(f"{path}: damaged: {error}") from None


def _checked(svg: str, key: str) -> str:
    """A drawing written anew from what of it has been checked. Raises ValueError if matplotlib would not write it."""
    if "<!" in svg or "<?" in svg:
        raise ValueError(f"{key!r}: more than elements, as in a drawing")
    root = ElementTree.fromstring(svg)
    paths = {f"#{each.get('id')}" for each in root.iter("path")}

    def check(element: ElementTree.Element, above: tuple[str, ...]) -> None:
        tag, reference = element.tag, element.get("href", "")
        if (tag == "svg") != (not above) or tag not in _ELEMENTS or len(above) > _MOST_DEPTH:
            raise ValueError(f"{key!r}: {tag!r}: not an element of a drawing here")
        # What repeats another element could repeat one that repeats others, without end.
        repeats = any("url(" in value for value in element.attrib.values()) and {"pattern", "clipPath"} & {*above, tag}
        if repeats or (tag == "use" and reference not in paths) or (tag != "use" and reference.startswith("#")):
            raise ValueError(f"{key!r}: {tag}: refers to what a drawing does not refer to")
        for name, value in element.attrib.items():
            if name not in _VALUES or not re.fullmatch(_VALUES[name], value):
                raise ValueError(f"{key!r}: {tag}: {name}={value[:50]!r}: not an attribute of a drawing")
        for below in element:
            check(below, (*above, tag))

    check(root, ())
    return ElementTree.tostring(root, encoding="unicode")
