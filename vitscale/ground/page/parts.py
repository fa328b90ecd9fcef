"""The parts of a page. All text is plain text: what looks like HTML in it is shown, never obeyed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitscale.ground.page.drawing import Drawing
from vitscale.ground.table import ResultTable

Tone = Literal["plain", "note", "warning", "good"]
"""How a text is set: a paragraph, a small note, a warning that stands out, or the same for good news."""


@dataclass(frozen=True)
class Text:
    """One paragraph."""

    text: str
    tone: Tone = "plain"
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Facts:
    """Names with what is known about each; a value of several lines has a line for each."""

    rows: Sequence[tuple[str, str]]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Table:
    """A `ResultTable`. A pointer over a number shows all its digits. What is None is shown as a dash.

    `marked` are the indices of rows that stand out.
    """

    table: ResultTable
    caption: str = ""
    marked: frozenset[int] = frozenset()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Folded:
    """Parts behind a line that opens them; open in print."""

    title: str
    parts: Sequence["Part"]
    kind: ClassVar[str] = "folded"


Part = Text | Facts | Table | Drawing | Folded


@dataclass(frozen=True)
class Section:
    """A heading and what is below it. Sections are listed at the top of the page."""

    title: str
    parts: Sequence[Part]
