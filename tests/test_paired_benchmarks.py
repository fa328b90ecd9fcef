"""The interval in which a benchmark's goal is looked for, against printed tables."""

import pytest
from paired import Interval, median_interval, median_ratio


def test_ranks_are_those_of_the_printed_sign_test():
    """Critical values of the two-sided sign test at 5 %, as statistics books print them; the interval begins beyond."""
    printed = {6: 0, 9: 1, 12: 2, 15: 3, 17: 4, 20: 5, 25: 7, 30: 9, 40: 13, 50: 17}
    for rounds, below in printed.items():
        found = median_interval(range(1, rounds + 1))  # of values that are their own ranks
        assert (found.low - 1, rounds - found.high) == (below, below)


def test_few_rounds_give_all_that_was_seen():
    assert median_interval([3.0]) == Interval(3.0, 3.0, 3.0)
    assert median_interval([4.0, 1.0, 2.0, 9.0, 3.0, 8.0]) == Interval(3.5, 1.0, 9.0)


def test_rounds_are_compared_each_with_its_own():
    """A clock that slows both readers of a round leaves their ratio; two fast rounds of one alone do not move it."""
    clock = [1.0, 0.65, 1.0, 0.65, 1.0, 0.65, 0.65, 1.0, 1.0]
    peer = [2000 * speed for speed in clock]
    ours = [0.993 * value for value in peer]
    ours[0], ours[1] = ours[0] * 0.6, ours[1] * 1.5
    found = median_ratio(ours, peer)
    assert (found.median, found.low, found.high) == pytest.approx((0.993, 0.993, 0.993))
    with pytest.raises(ValueError):
        median_ratio(ours, peer[1:])


def test_a_goal_is_missed_only_where_the_whole_interval_lies_beyond_it():
    found = Interval(0.04, 0.01, 0.06)
    assert not found.is_above(0.03) and found.is_above(0.009)
    assert not found.is_below(0.05) and found.is_below(0.061)
