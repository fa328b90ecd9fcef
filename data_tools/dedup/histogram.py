"""Draws two histograms for each test set: hash distances with what is removed, and correlations of candidates."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_tools.dedup.settings import COUNTED, Settings
from data_tools.dedup.tail import (
    STEP_BITS,
    STEP_CORRELATION,
    Estimate,
    Expected,
    amount,
    correlation_bars,
    distance_bars,
    edge,
)
from vitscale.files.durable import durable_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS, _REMOVED, _COMPARED, _LINE = "#7f97b2", "#d9534f", "#f0ad4e", "#222222"
_PLACE = {"left": 0.055, "right": 0.985, "bottom": 0.27, "top": 0.88, "wspace": 0.14}
_LEAST = 0.5  # pairs: where the logarithmic axis begins


def missing() -> str | None:
    """Why histograms cannot be drawn, and what to do; None if they can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "no histograms without matplotlib: pip install matplotlib"
    except ValueError as error:  # it wants to know the backend of MPLBACKEND, though nothing is shown in a window
        return f"no histograms: matplotlib refuses its settings (MPLBACKEND, matplotlibrc): {error}"
    return None


def draw_histogram(
    path: Path, name: str, distances: np.ndarray, correlations: np.ndarray, settings: Settings, expected: Expected
) -> None:
    """Write a test set's histogram as PNG.

    Args:
        path: the file.
        name: of the test set, in plain text.
        distances, correlations: int (91,) and (100,), its counts in a `tally.Tally`.
        settings: by which pairs were removed.
        expected: what `tail.expected_false` makes of these.

    Raises OSError.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), dpi=110)
    left, right = figure.subplots(1, 2, gridspec_kw=_PLACE)
    figure.suptitle(name, fontsize=13, fontweight="bold", parse_math=False)
    _draw_distances(left, distances, settings, expected)
    _draw_correlations(right, correlations, settings, expected)
    with warnings.catch_warnings(), durable_file(path) as file:
        warnings.filterwarnings("ignore", message="Glyph")  # names of any script: a letter that is missing is a box
        figure.savefig(file, format="png", metadata={"Software": None})  # equal figures are equal files


def _draw_distances(axes: "Axes", distances: np.ndarray, settings: Settings, expected: Expected) -> None:
    bars = distance_bars(distances)
    bits = np.arange(STEP_BITS, COUNTED + 1, STEP_BITS)
    axes.set_title("How near are the hashes of an image and a test image?")
    axes.set_xlabel("bits that differ, of 256")
    axes.set_ylabel("pairs, two bits a bar")
    begin, end = -1, COUNTED + 1
    removed_end, compared_end = edge(settings.distance), edge(settings.candidates)
    axes.axvspan(
        begin, removed_end, color=_REMOVED, alpha=0.12, label=f"removed by the hash: up to {settings.distance}"
    )
    if compared_end > removed_end:
        label = f"pictures compared: up to {settings.candidates}"
        axes.axvspan(removed_end, compared_end, color=_COMPARED, alpha=0.14, label=label)
    for place, colour in ((compared_end, _COMPARED), (removed_end, _REMOVED)):
        axes.axvline(place, color=colour, linewidth=1.2)
    _finish(axes, (begin, end), np.array([0, *bits]), np.array([distances[0], *bars]), expected.hash)


def _draw_correlations(axes: "Axes", correlations: np.ndarray, settings: Settings, expected: Expected) -> None:
    bars = correlation_bars(correlations)
    axes.set_title("How alike are those whose pictures were compared?")
    axes.set_xlabel("correlation of the pictures, laid over each other")
    axes.set_ylabel("pairs, 0.02 a bar")
    label = f"removed: from {settings.correlation:g}"
    axes.axvspan(settings.correlation, 1, color=_REMOVED, alpha=0.12, label=label)
    axes.axvline(settings.correlation, color=_REMOVED, linewidth=1.2)
    middles = (np.arange(len(bars)) + 0.5) * STEP_CORRELATION
    _finish(axes, (0, 1), middles, bars, expected.correlation)


def _finish(
    axes: "Axes", limits: tuple[float, float], middles: np.ndarray, bars: np.ndarray, estimate: Estimate
) -> None:
    """The bars; the fitted line, solid where it was fitted; scales; the legend below."""
    if bars.any():
        axes.bar(middles, bars, 0.9 * (middles[1] - middles[0]), color=_BARS)
        axes.set_yscale("log")
        axes.set_ylim(_LEAST, max(10, int(bars.max())) * 2)
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", fontsize=14, color="#666666")
        axes.set_yticks([])
    fit = estimate.fit
    if fit is not None:
        for begin, end, dashes, label in (
            (*limits, "--", "_"),  # a legend leaves that out
            (fit.first, fit.last, "-", "no copies, near by chance: fitted, and followed (dashed)"),
        ):
            x = np.linspace(begin, end, 200)
            axes.plot(x, np.exp(fit.intercept + fit.slope * x), dashes, label=label, color=_LINE, linewidth=1.6)
    axes.plot([], [], " ", label=f"wrongly removed here, expected: {_in_words(estimate)}")
    axes.set_xlim(*limits)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize=9, frameon=False)


def _in_words(estimate: Estimate) -> str:
    if estimate.at_most == 0:
        return "none"
    expected = "too few pairs to fit" if estimate.expected is None else amount(estimate.expected)
    at_most = amount(estimate.at_most)
    return expected if expected == at_most else f"{expected}, at most {at_most}"
