"""Renders a page: one HTML document that refers to nothing outside it, the same bytes for the same parts."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

import vitscale
from vitscale.ground.errors import RecipeError
from vitscale.ground.page.drawing import FAINT, SERIES, Drawing, draw, standalone
from vitscale.ground.page.parts import Part, Section
from vitscale.ground.safe_text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page_text(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The HTML document. `subtitle` is a line below the title: what this is, and about what."""
    page = _template().render(
        title=title,
        subtitle=subtitle,
        sections=[(f"part-{index}", section) for index, section in enumerate(sections, start=1)],
        series=SERIES,
        version=vitscale.__version__,
    )
    return shown(page)


def fragment(parts: Sequence[Part]) -> str:
    """The parts as HTML within another page, such as a notebook, with what they need of this page's style."""
    nothing: dict[str, Any] = {"title": "", "subtitle": "", "sections": [], "series": SERIES, "version": ""}
    show = _template().make_module(nothing).show  # type: ignore[attr-defined]
    colours = "".join(f"--series-{index}: {colour}; " for index, colour in enumerate(SERIES, start=1))
    style = f"{colours}--faint: {FAINT}; --sans: sans-serif"
    return shown(f'<div style="{style}">{"".join(map(show, parts))}</div>')


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        key: the name of its files: letters, digits and `_`.
        title, caption: its title, and a text that says how to read it.
        put: draws it into an empty figure of `width` x `height` CSS pixels.
    """

    key: str
    title: str
    caption: str
    put: "Callable[[Figure], None]"
    width: int
    height: int

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write it to a file that ends in `.png` or `.svg`. Raises `RecipeError` for any other, and OSError."""
        suffix = Path(file).suffix
        if suffix not in (".png", ".svg"):
            raise RecipeError(f"{os.fspath(file)}: expected a file that ends in .png or .svg")
        content = standalone(self.put, "png" if suffix == ".png" else "svg", width=self.width, height=self.height)
        Path(file).write_bytes(content)

    @property
    def drawing(self) -> Drawing:
        """It as a part of a page."""
        name = self.key.replace("_", "-")
        return draw(name, self.title, self.put, width=self.width, height=self.height, caption=self.caption)

    def _repr_html_(self) -> str:
        return fragment([self.drawing])


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("vitscale.ground.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["all_digits"] = _all_digits
    return environment.get_template("page.html")


def _all_digits(value: Any) -> str:
    """A number as results.json has it; empty for anything else. A number that is not finite is a bug."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        raise ValueError(f"{value} on a page: what is not known is None")
    return json.dumps(value)
