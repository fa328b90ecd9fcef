"""Results that show themselves in a notebook. All text of theirs is shown, never obeyed."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitscale.evaluation.prediction import Prediction
from vitscale.ground.errors import RecipeError
from vitscale.ground.page import Drawing, Facts, Table, draw, fragment, standalone
from vitscale.ground.table import Column, ResultTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure


class Results(dict[str, Any]):
    """Results by name."""

    def _repr_html_(self) -> str:
        return fragment([Facts(list(_flat(self)))])


class Predictions(list[Prediction]):
    """Predictions in the order of their pictures."""

    def __init__(self, found: Iterable[Prediction]) -> None:
        super().__init__(found)

    def _repr_html_(self) -> str:
        columns = [Column("picture", "picture", is_text=True), Column("classes", "classes", is_text=True)]
        rows = [
            {"picture": each.file, "classes": ", ".join(f"{name} {share:.1%}" for name, share in each.classes)}
            for each in self
        ]
        return fragment([Table(ResultTable(columns, rows))])


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        name: letters, digits and `-`.
        title, caption: its title, and a text that says how to read it.
        put: draws it into an empty figure of `width` x `height` CSS pixels.
    """

    name: str
    title: str
    put: "Callable[[Figure], None]"
    width: int = 720
    height: int = 300
    caption: str = ""

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
        return draw(self.name, self.title, self.put, width=self.width, height=self.height, caption=self.caption)

    def _repr_html_(self) -> str:
        return fragment([self.drawing])


def facts(rows: Mapping[str, object]) -> Facts:
    """What is known, by name; None is left out."""
    return Facts([(name, _text(value)) for name, value in rows.items() if value is not None])


def _flat(content: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}: ")
        else:
            yield f"{above}{key}", _text(value)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
