"""Which candidate wins: a pure function of what their runs reached on development splits, and of nothing else."""

import math
import statistics
from collections.abc import Mapping, Sequence

from vitscale.about.studies.schema import Selection


def mean_scores(scores: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """The mean of each candidate over its runs; None if one of them has diverged."""
    means = {}
    for label, values in scores.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        means[label] = statistics.fmean(known) if known and len(known) == len(values) else None
    return means


def choose(rule: Selection, scores: Mapping[str, Sequence[float | None]]) -> str | None:
    """The label of the winner, the first of equal ones; None if every candidate has diverged.

    `scores`: label -> the metric of each of its runs (seeds, and data sets that share a winner), None for one that has
    diverged.
    """
    sign = 1 if rule.mode == "max" else -1
    known = [(sign * mean, label) for label, mean in mean_scores(scores).items() if mean is not None]
    return max(known, key=lambda one: one[0])[1] if known else None
