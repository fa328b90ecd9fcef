"""Pages of results: one HTML file each that refers to nothing outside it, with tables, figures and pictures."""

from vitscale.ground.page.drawing import FAINT, SERIES, Drawing, check_drawing, draw, standalone
from vitscale.ground.page.parts import Facts, Folded, Part, Section, Table, Text, Tone
from vitscale.ground.page.rendering import Plot, fragment, page_text
