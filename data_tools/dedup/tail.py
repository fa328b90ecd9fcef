"""Estimates the false-positive rate from the distribution of near misses.

The nearer, the rarer unrelated pictures are: their number falls about a hundredfold in ten bits. Copies are at any
distance, and between the two there is a valley. Above it a straight line is fitted to the logarithm of the counts, and
extended to where pairs are removed. The tail of a normal distribution bends down, below such a line, so the line tends
to overestimate. The same is done with the correlation of candidates, from the other side.

Look-alikes are not in this number: two shots of one thing, or two drawings in one style, are near for a reason, and no
histogram tells them from copies. The contact sheets are for them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_tools.dedup.settings import COUNTED, Settings

STEP_BITS = 2  # a hash has as many ones as zeros, so distances are even
STEP_CORRELATION = 0.02
_ENOUGH = 20  # pairs, to fit a line to
_MANY = 1000  # times the valley: higher bars say nothing about the end near the valley, which is what matters
_NEAR_VALLEY = 50  # times the valley: the same for correlations, of which there are fewer
_PENALTY = 2.0  # log-likelihood that attributing a bar to copies must gain
_STEEPEST = 8.0  # change of the logarithm per bar
_SMOOTH = 5  # bars


@dataclass(frozen=True)
class Fit:
    """A straight line through the logarithm of counts: `exp(intercept + slope * x)` pairs in a bar around `x`."""

    slope: float  # with `x` in bits or as a correlation
    intercept: float
    error: float  # standard error of the slope
    first: float  # middle of the first bar that was fitted, in the order of `x`
    last: float  # middle of the last one
    step: float  # width of a bar

    def pairs(self, low: float, high: float) -> float:
        """The number of pairs on the line between two values of `x`."""
        return _area(self.slope, self.intercept, low, high) / self.step

    def most_pairs(self, low: float, high: float) -> float:
        """An upper bound: slopes up to two standard errors off, with the same number of pairs where it was fitted."""
        begin, end = self.first - self.step / 2, self.last + self.step / 2
        fitted = _area(self.slope, self.intercept, begin, end)
        slopes = self.slope - 2 * self.error, self.slope, self.slope + 2 * self.error
        shares = [_area(slope, 0, low, high) / _area(slope, 0, begin, end) for slope in slopes]
        return max(shares) * fitted / self.step


@dataclass(frozen=True)
class Estimate:
    """The number of removed pairs that are not copies."""

    expected: float | None  # None if too few pairs were counted to tell
    at_most: float  # upper bound with a probability of 95 %, from the fit; from counts alone if there is none
    fit: Fit | None  # behind these numbers


class Expected(NamedTuple):
    """The estimates for pairs removed by their hashes alone, and for candidates removed by their correlation."""

    hash: Estimate
    correlation: Estimate


def expected_false(distances: np.ndarray, correlations: np.ndarray, settings: Settings) -> Expected:
    """How many pairs of unrelated pictures to expect among the removed ones.

    Args:
        distances: int (91,), pairs by distance, as `Findings` counts them for a test set.
        correlations: int (100,), candidates by correlation, likewise.
        settings: the settings by which pairs were removed.
    """
    if not settings.near:
        none = Estimate(0.0, 0.0, None)
        return Expected(none, none)
    bits = np.arange(STEP_BITS, COUNTED + 1, STEP_BITS)
    # Counts of 1 and 2 bits, 3 and 4, up to 89 and 90; pairs at distance 0 are copies, and left out.
    tail = _fitted(distances[1:].reshape(-1, STEP_BITS).sum(1), bits.astype(float), STEP_BITS)
    by_hash = _near_by_chance(tail, distances, -1, edge(settings.distance))
    candidates = _near_by_chance(tail, distances, edge(settings.distance), edge(settings.candidates))
    fit = _correlation_fit(correlations, settings.correlation)
    if fit is None:  # no more can be wrong than there are candidates
        return Expected(by_hash, Estimate(None, candidates.at_most, None))
    expected = fit.pairs(settings.correlation, 1)
    at_most = min(fit.most_pairs(settings.correlation, 1), candidates.at_most)
    if candidates.expected is not None:
        expected = min(expected, candidates.expected)
    return Expected(by_hash, Estimate(min(expected, at_most), at_most, fit))


def amount(value: float) -> str:
    """An expected number, for people."""
    if value < 0.01:
        return "< 0.01" if value else "0"
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def edge(distance: int) -> int:
    """The end of the bar that a distance belongs to, in bits."""
    return distance // STEP_BITS * STEP_BITS + 1


def _near_by_chance(tail: Fit | None, distances: np.ndarray, low: int, high: int) -> Estimate:
    if tail is not None:
        return Estimate(tail.pairs(low, high), tail.most_pairs(low, high), tail)
    # There are more pairs the larger the distance: no more here than in as many bits at the end.
    seen = int(distances[max(0, COUNTED + 1 - (high - low)) :].sum())
    return Estimate(None, seen + 2 * seen**0.5 + 3, None)


def _correlation_fit(correlations: np.ndarray, threshold: float) -> Fit | None:
    """The fit where candidates become rarer with growing correlation, before the threshold and the copies beyond it."""
    bars = correlations.reshape(-1, 2).sum(1)  # counts of 0 to 0.02, up to 0.98 to 1
    middles = (np.arange(len(bars)) + 0.5) * STEP_CORRELATION
    below = int(np.searchsorted(middles, threshold))
    if below < 2:
        return None
    smooth = np.convolve(bars[1:], np.ones(_SMOOTH), "same")[: below - 1]  # bar 0 also holds all negative ones
    begin = int(np.argmax(smooth))
    # The top of the hill is not part of its slope, and the nearer to the valley, the less a bend matters.
    level = min(smooth[begin] / 2, _NEAR_VALLEY * max(1, smooth[begin:].min()))
    while begin < len(smooth) and smooth[begin] > level:
        begin += 1
    begin += 1
    return _fitted(bars[begin:][::-1], middles[begin:][::-1], STEP_CORRELATION)


def _fitted(bars: np.ndarray, middles: np.ndarray, step: float) -> Fit | None:
    """The line through the rising end of a histogram, without the copies to the left of it.

    Where the copies end is decided by likelihood: of the bars left of the line's first one, those above the line may
    hold any number of copies as well, for a penalty; those below it count against the line.

    Returns None for fewer than 20 pairs or three bars, or if the slope is not certainly positive.
    """
    if len(bars) < 3:
        return None
    top = len(bars) - 1
    valley = max(1.0, float(np.median(bars)))
    while top > 0 and bars[top] > _MANY * valley:
        top -= 1
    scale = max(1.0, float(bars[top]) / _MANY)  # no line fits counts more closely than a few per cent
    counts = bars[: top + 1] / scale
    best: tuple[float, int, float, float] | None = None
    for first in range(top - 1):
        if counts[first:].sum() < _ENOUGH:
            break
        slope, level = _line(counts[first:])
        line = np.exp(level + slope * (np.arange(top + 1) - first))
        misfit = _misfit(counts, line)
        misfit[:first] = np.where(counts[:first] > line[:first], np.minimum(misfit[:first], _PENALTY), misfit[:first])
        cost = float(misfit.sum())
        if best is None or cost < best[0]:
            best = cost, first, slope, level
    if best is None:
        return None
    _, first, slope, level = best
    error = _slope_error(counts[first:], slope)
    if np.count_nonzero(counts[first:]) < 3 or slope < 3 * error:
        return None
    width = float(middles[1] - middles[0])  # negative for the correlation
    begin, end = sorted((float(middles[first]), float(middles[top])))
    intercept = level + np.log(scale) - slope * float(middles[first]) / width
    return Fit(slope / width, float(intercept), error / abs(width), begin, end, step)


def _line(counts: np.ndarray) -> tuple[float, float]:
    """The most likely line through the logarithm of counts: slope per bar, and value at the first bar.

    With the total as counted, the line's mean position equals that of the counts; it grows with the slope.
    """
    position = np.arange(len(counts))
    total = counts.sum()
    mean = counts @ position / total
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(50):
        slope = (low + high) / 2
        shares = _shares(slope, len(counts))
        low, high = (slope, high) if shares @ position < mean else (low, slope)
    return slope, float(np.log(total * _shares(slope, len(counts))[0]))


def _shares(slope: float, bars: int) -> np.ndarray:
    exponent = slope * np.arange(bars)
    weights = np.exp(exponent - exponent.max())
    return weights / weights.sum()


def _slope_error(counts: np.ndarray, slope: float) -> float:
    """Standard error, from the Fisher information: the total times the variance of the position."""
    position, shares = np.arange(len(counts)), _shares(slope, len(counts))
    variance = float(shares @ position**2 - (shares @ position) ** 2)
    return float((counts.sum() * max(variance, 1e-12)) ** -0.5)


def _misfit(counts: np.ndarray, line: np.ndarray) -> np.ndarray:
    """How much less likely the line makes the counts than they make themselves (log, Poisson); half the deviance."""
    ratio = np.where(counts > 0, counts, 1) / np.where(counts > 0, np.maximum(line, 1e-300), 1)
    return counts * np.log(ratio) - counts + line


def _area(slope: float, intercept: float, low: float, high: float) -> float:
    if abs(slope * (high - low)) < 1e-9:
        return float(np.exp(intercept + slope * low) * (high - low))
    return float((np.exp(intercept + slope * high) - np.exp(intercept + slope * low)) / slope)
