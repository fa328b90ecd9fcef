"""Pages of results: one HTML file each that refers to nothing outside it, with tables, figures and pictures."""

from vitscale.page.drawing import FAINT, SERIES, Drawing, check_drawing, draw, standalone
from vitscale.page.parts import Facts, Folded, Part, Picture, Section, Side, Table, Text, Tone
from vitscale.page.rendering import page_text

__all__ = [
    "FAINT",
    "SERIES",
    "Drawing",
    "Facts",
    "Folded",
    "Part",
    "Picture",
    "Section",
    "Side",
    "Table",
    "Text",
    "Tone",
    "check_drawing",
    "draw",
    "page_text",
    "standalone",
]
