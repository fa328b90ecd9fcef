"""A figure that shows itself in a notebook, and can be saved."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.ground.errors import RecipeError
from vitscale.ground.page.drawing import Drawing, draw, standalone
from vitscale.ground.page.rendering import fragment

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure


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
