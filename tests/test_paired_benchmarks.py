"""The interval in which a benchmark's goal is looked for, against the binomial distribution and printed tables."""

import itertools
from fractions import Fraction
from math import comb

import pytest
from paired import CONFIDENCE, Interval, median_interval, median_ratio


def rank_of_low_end(rounds: int) -> int:
    """Counted from the outside, by values that are their own ranks."""
    found = median_interval(range(1, rounds + 1))
    assert found.low + found.high == rounds + 1  # as far from either end
    return int(found.low)


def coverage(rounds: int, rank: int) -> Fraction:
    """P(rank <= X <= rounds - rank), X of a binomial of 1/2: that enough values are on either side of the median."""
    return Fraction(sum(comb(rounds, below) for below in range(rank, rounds - rank + 1)), 2**rounds)


def test_ranks_are_those_of_the_printed_sign_test():
    """Critical values of the two-sided sign test at 5 %, as statistics books print them; the interval begins beyond."""
    printed = {6: 0, 9: 1, 12: 2, 15: 3, 17: 4, 20: 5, 25: 7, 30: 9, 40: 13, 50: 17}
    assert {rounds: rank_of_low_end(rounds) - 1 for rounds in printed} == printed


def test_the_interval_covers_the_median_as_often_as_promised_and_is_no_wider():
    for rounds in range(6, 80):
        rank = rank_of_low_end(rounds)
        assert coverage(rounds, rank) >= CONFIDENCE > coverage(rounds, rank + 1), rounds


@pytest.mark.parametrize("rounds", [1, 5, 6, 9])
def test_every_way_to_fall_around_the_median_is_covered_in_the_share_of_the_binomial(rounds):
    """All 2^n equally likely patterns of signs around a true median of 0."""
    held = 0
    for signs in itertools.product((-1, 1), repeat=rounds):
        found = median_interval(sign * (1 + place) for place, sign in enumerate(signs))
        held += found.low <= 0 <= found.high
    rank = rank_of_low_end(rounds)
    assert Fraction(held, 2**rounds) == coverage(rounds, rank)
    assert rank == 1 or coverage(rounds, rank) >= CONFIDENCE


def test_few_rounds_give_all_that_was_seen():
    assert median_interval([3.0]) == Interval(3.0, 3.0, 3.0)
    assert median_interval([5.0, 1.0, 2.0]) == Interval(2.0, 1.0, 5.0)
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
