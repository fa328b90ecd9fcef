"""Expected false removals: against histograms of which the truth is known in closed form."""

from math import erf, sqrt

import numpy as np
import pytest

from data_tools.dedup.settings import COUNTED, PRESETS, Settings
from data_tools.dedup.tail import expected_false

_BITS = np.arange(COUNTED + 1)
_NO_CORRELATIONS = np.zeros(100, np.int64)
_REMOVED = round(100 * Settings().correlation)  # the first bin of correlations that are reached


def _even(density: np.ndarray) -> np.ndarray:
    """Two PDQ hashes have as many ones, so they differ in an even number of bits."""
    return np.where(_BITS % 2 == 0, density, 0.0)


def _copies(rng: np.random.Generator, count: int, farthest: int) -> np.ndarray:
    """Of which most are near."""
    distances = np.minimum(2 * rng.geometric(4 / farthest, count), farthest)
    return np.bincount(distances, minlength=COUNTED + 1)


@pytest.mark.parametrize("slope", [0.25, 0.35, 0.46])  # 0.46: a hundredfold in ten bits, as unrelated photos have it
@pytest.mark.parametrize(("copies", "farthest"), [(0, 40), (300, 40), (5000, 64)])
def test_geometric_tail_is_followed_to_the_threshold(slope: float, copies: int, farthest: int) -> None:
    rng = np.random.default_rng(int(slope * 100) + copies)
    tail = _even(1e5 * np.exp(slope * (_BITS - COUNTED)))
    expected = expected_false(rng.poisson(tail) + _copies(rng, copies, farthest), _NO_CORRELATIONS, Settings())
    truth = tail[:32].sum()
    assert expected.hash.expected is not None
    assert truth / 2 < expected.hash.expected < truth * 2
    assert expected.hash.fit is not None
    assert expected.hash.fit.slope == pytest.approx(slope, rel=0.05)


def test_small_counts_are_not_undersold() -> None:
    inside = known = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tail = _even(rng.uniform(30, 300) * np.exp(rng.uniform(0.25, 0.5) * (_BITS - COUNTED)))
        expected = expected_false(rng.poisson(tail) + _copies(rng, 40, 50), _NO_CORRELATIONS, Settings())
        known += expected.hash.expected is not None
        inside += tail[:32].sum() <= expected.hash.at_most
    assert known >= 55
    assert inside >= 54  # of 60: two standard errors, less what the choice of the range adds


@pytest.mark.parametrize("effective_bits", [70, 100])
def test_tail_that_bends_down_is_rather_overestimated(effective_bits: int) -> None:
    rng = np.random.default_rng(effective_bits)
    deviation = 256 / 2 / sqrt(effective_bits)  # a binomial of so many independent bits, scaled to 256

    def pairs_up_to(bits: np.ndarray) -> np.ndarray:
        return 1e8 / 2 * (1 + np.vectorize(erf)((bits - 128) / deviation / sqrt(2)))

    density = _even(pairs_up_to(_BITS + 1.0) - pairs_up_to(_BITS - 1.0))
    counts = rng.poisson(density)
    for distance, most in ((31, 1e5), (60, 20), (70, 3)):
        estimate = expected_false(counts, _NO_CORRELATIONS, Settings(distance=distance)).hash.expected
        truth = density[: distance + 1].sum()
        assert estimate is not None
        assert 0.7 * truth < estimate < most * truth


def test_plateau_of_look_alikes_is_no_tail() -> None:
    # CIFAR-10's training images against 5,000 of its test images, two bits a number from 50 on.
    seen = [28, 25, 26, 26, 25, 24, 39, 40, 45, 61, 76, 127, 214, 385, 753, 1599, 3614, 8627, 20872, 51450, 127652]
    counts = np.zeros(COUNTED + 1, np.int64)
    counts[50::2] = seen
    counts[10:50:2] = 15
    fit = expected_false(counts, _NO_CORRELATIONS, PRESETS["small"]).hash.fit
    assert fit is not None
    assert fit.first >= 66
    assert 0.38 < fit.slope < 0.46  # log(127,652 / 1,599) / 10 is 0.438


@pytest.mark.parametrize("copies", [0, 150, 3000])
def test_correlation_of_candidates_is_followed_to_the_threshold(copies: int) -> None:
    rng = np.random.default_rng(copies)
    middles = (np.arange(100) + 0.5) / 100
    tail = np.where(middles < 0.3, 1600.0, 1600 * np.exp(-14 * (middles - 0.3)))
    near_one = np.minimum(99, (100 * (1 - rng.exponential(0.02, copies))).astype(int))
    correlations = rng.poisson(tail) + np.bincount(near_one, minlength=100)
    distances = rng.poisson(_even(1e7 * np.exp(0.4 * (_BITS - COUNTED))))
    expected = expected_false(distances, correlations, Settings())
    truth = tail[_REMOVED:].sum()
    assert expected.correlation.expected is not None
    assert truth / 2 < expected.correlation.expected < truth * 2
    assert truth <= expected.correlation.at_most * 1.2


def test_correlations_of_a_normal_distribution_are_rather_overestimated() -> None:
    rng = np.random.default_rng(3)
    middles = (np.arange(100) + 0.5) / 100
    tail = 3000 * np.exp(-0.5 * ((middles - 0.2) / 0.16) ** 2)
    copies = np.minimum(99, (100 * (1 - rng.exponential(0.03, 2000))).astype(int))
    distances = rng.poisson(_even(2e7 * np.exp(0.46 * (_BITS - COUNTED))))
    correlations = rng.poisson(tail) + np.bincount(copies, minlength=100)
    estimate = expected_false(distances, correlations, Settings()).correlation.expected
    assert estimate is not None
    assert tail[_REMOVED:].sum() < estimate < 10 * tail[_REMOVED:].sum()


def test_few_candidates_cannot_be_more_wrong_than_the_tail_allows() -> None:
    rng = np.random.default_rng(0)
    tail = _even(1e4 * np.exp(0.46 * (_BITS - COUNTED)))
    correlations = np.zeros(100, np.int64)
    correlations[[20, 35, 95, 97, 99]] = 1
    expected = expected_false(rng.poisson(tail), correlations, Settings())
    assert expected.correlation.expected is None
    assert tail[32:81].sum() * 0.8 < expected.correlation.at_most < tail[32:81].sum() * 2


def test_nothing_counted_is_nothing_known() -> None:
    expected = expected_false(np.zeros(COUNTED + 1, np.int64), _NO_CORRELATIONS, Settings())
    assert expected.hash.expected is None and expected.correlation.expected is None
    assert expected.hash.at_most == expected.correlation.at_most == 3  # none seen: fewer than three, with 95 %


def test_copies_alone_are_no_tail() -> None:
    counts = _copies(np.random.default_rng(1), 2000, 50)
    expected = expected_false(counts, _NO_CORRELATIONS, Settings())
    assert expected.hash.expected is None
    assert expected.hash.at_most == 3  # pairs of no copies would be more where hashes are farther
    of_all = expected_false(counts, _NO_CORRELATIONS, Settings(distance=COUNTED, candidates=COUNTED))
    assert of_all.hash.at_most >= 2000


def test_equal_bytes_and_pixels_are_never_wrong() -> None:
    expected = expected_false(np.full(COUNTED + 1, 9), np.full(100, 9), PRESETS["exact"])
    for estimate in (expected.hash, expected.correlation):
        assert estimate.expected == estimate.at_most == 0


def test_no_histogram_and_no_setting_is_too_odd() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        distances = rng.poisson(10 ** rng.uniform(-3, 15) * rng.uniform(0, 1, COUNTED + 1) ** rng.integers(0, 60))
        correlations = rng.poisson(10 ** rng.uniform(-3, 15) * rng.uniform(0, 1, 100) ** rng.integers(0, 60))
        candidates = int(rng.integers(0, COUNTED + 1))
        correlation = float(rng.choice([0, 0.02, 0.03, 0.5, 0.99, 1]))
        settings = Settings(True, int(rng.integers(0, candidates + 1)), candidates, correlation)
        expected = expected_false(distances, correlations, settings)
        for estimate in (expected.hash, expected.correlation):
            assert np.isfinite(estimate.at_most) and estimate.at_most >= 0
            assert estimate.expected is None or 0 <= estimate.expected <= estimate.at_most
