"""Contenders that took turns, compared round by round: the median of the rounds' ratios and its confidence interval.

A machine's clock and its neighbours change within seconds, by more than what a goal allows. The rounds of a pair change
together, and a median does not mind the few that did not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """The median of some rounds, and the range that holds the true one with a probability of CONFIDENCE or more.

    Fewer than 6 rounds do not tell so much: their range is all that was seen, which holds it with 94 % (5 rounds), 88 %
    (4), 75 % (3) or 50 % (2).
    """

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """As in 1.25 (1.21 to 1.31)."""
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    def is_above(self, limit: float) -> bool:
        """Whether the whole interval is."""
        return self.low > limit

    def is_below(self, limit: float) -> bool:
        """Whether the whole interval is."""
        return self.high < limit


def median_interval(values: Iterable[float]) -> Interval:
    """By the sign test: of order statistics, whatever the distribution of the (independent) values."""
    ordered = sorted(values)
    rank, middle = _rank_of_low_end(len(ordered)), len(ordered) // 2
    return Interval((ordered[middle] + ordered[~middle]) / 2, ordered[rank - 1], ordered[-rank])


def median_ratio(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Of one contender's figures by the other's, of the same rounds."""
    return median_interval(a / b for a, b in zip(one, other, strict=True))


def _rank_of_low_end(rounds: int) -> int:
    """The largest r such that the r-th lowest and the r-th highest value hold the median between them; 1 at least.

    They do not where fewer than r values are below the median, or above it: twice the tail of a binomial of 1/2.
    """
    rank, outside = 0, 0
    while 2 * (outside + comb(rounds, rank)) <= (1 - CONFIDENCE) * 2**rounds:
        outside += comb(rounds, rank)
        rank += 1
    return max(rank, 1)
