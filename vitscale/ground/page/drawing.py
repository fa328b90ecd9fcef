"""Figures as SVG within a page: text as text, colours that follow the page's light, dark or print.

matplotlib draws each with its own defaults, not with the user's settings, and without pyplot: equal figures are equal
bytes.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vitscale.ground.errors import RecipeError
from vitscale.ground.safe_text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = ("#1f6fb4", "#c2571a", "#2a8a4a", "#8a4fb0", "#b8860b", "#c23b6b", "#3a8f9c", "#7a6a58")
"""Colours for lines and points. Each becomes the page's variable `--series-N`, which has another value in dark mode."""
FAINT = "#7b8087"  # The colour of the background: grid lines, figures of others. Becomes `--faint`.

_INK = "#010203"  # the colour of all else; becomes that of the page's text
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitscale",
    "savefig.transparent": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK
    ),
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}
_DROPPED = re.compile(r'<!--.*?-->|<style.*?</style>| xmlns(?::\w+)?="[^"]*"', re.DOTALL)
_FONT = re.compile(r'font-family: [^;"]*')
_ID = re.compile(r'(\bid="|xlink:href="#|url\(#)')


@dataclass(frozen=True)
class Drawing:
    """A figure to put into a page.

    Attributes:
        svg: an SVG element, from `draw`.
        alt: what it shows, in words.
        width: the most, in CSS pixels.
    """

    svg: str
    alt: str
    width: int
    caption: str = ""
    kind: ClassVar[str] = "drawing"


def check_drawing(what: str) -> None:
    """Raise `RecipeError` if matplotlib is missing or refuses its settings. `what` needs it: `vitscale report`."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise RecipeError(f"{what} needs matplotlib: pip install matplotlib") from None
    except ValueError as error:
        # matplotlib checks the backend in MPLBACKEND, though nothing is shown in a window.
        raise RecipeError(f"{what}: matplotlib refuses its settings (MPLBACKEND, matplotlibrc): {error}") from None


def draw(
    name: str, alt: str, put: "Callable[[Figure], None]", *, width: int = 720, height: int = 300, caption: str = ""
) -> Drawing:
    """Make a figure.

    Args:
        name: letters, digits and `-`; no two figures of a page have the same.
        alt: what it shows, in words.
        put: draws into an empty figure, with `SERIES`, `FAINT` and the default text colour alone.
        width, height: in CSS pixels.

    Raises `RecipeError` as `check_drawing` does.
    """
    return Drawing(_inline(_rendered(put, width, height, "svg", {}).decode(), name), alt, width, caption)


def standalone(put: "Callable[[Figure], None]", form: Literal["png", "svg"], *, width: int, height: int) -> bytes:
    """The same figure as a file of its own, on white; a PNG has two pixels for one of CSS."""
    on_white = {"savefig.transparent": False, "savefig.facecolor": "white", "savefig.dpi": 192}
    return _rendered(put, width, height, form, on_white | ({} if form == "png" else {"savefig.dpi": "figure"}))


def _rendered(
    put: "Callable[[Figure], None]", width: int, height: int, form: Literal["png", "svg"], style: dict[str, Any]
) -> bytes:
    check_drawing("the page")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    defaults: dict[str, Any] = {key: matplotlib.rcParamsDefault[key] for key in matplotlib.rcParamsDefault}
    defaults.pop("backend")
    file = io.BytesIO()
    settings: Any = {**defaults, **_STYLE, **style}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width / 96, height / 96), dpi=96, layout="constrained")
        put(figure)
        for text in figure.findobj(Text):
            text.set_text(shown(text.get_text()))
            if "$" in text.get_text():  # a name's; matplotlib's own, on logarithmic axes, come when it draws
                text.set_parse_math(False)
        unsaid = ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
        figure.savefig(file, format=form, metadata=dict.fromkeys(unsaid))
    return file.getvalue() if form == "png" else shown(file.getvalue().decode()).encode()


def _inline(svg: str, name: str) -> str:
    """The SVG element alone, with ids of its own and the page's colours."""
    svg = _DROPPED.sub("", svg[svg.index("<svg") :])
    svg = _ID.sub(lambda found: f"{found[0]}{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg)
    for index, colour in enumerate(SERIES, start=1):
        svg = svg.replace(colour, f"var(--series-{index})")
    svg = svg.replace(FAINT, "var(--faint)").replace(_INK, "currentColor")
    return _FONT.sub("font-family: var(--sans)", svg).strip()
