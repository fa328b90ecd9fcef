"""Random numbers as functions of small integers or of samples' keys and of nothing else: equal on every machine.

Keys are uint64 or int64 arrays of any shape, of which only the bits count. A purpose is one or more non-negative
integers; draws for different purposes are independent. Purposes below 1,000 belong to the crop, the flip and the
objectives that come with vitscale, so an objective of another package uses those from 1,000 on. Each operation on
images has keys of its own and may use any purpose.

All come from 64-bit hashes. NumPy's generators are not used: NumPy reserves the right to change what they draw from one
version to the next, and sample order and augmentation must not change with it. Arithmetic is limited to additions,
multiplications and square roots, which every processor rounds alike.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from statistics import NormalDist

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_NORMAL_BITS = 16
_NORMAL_UNIT = 2.0**-12


class Purpose(IntEnum):
    """What is drawn. A number that was used once means that for ever."""

    SHARDS = 1  # their order in an epoch
    WINDOW = 2  # the order of the samples in a window
    CROP = 3  # its area and aspect; with the epoch, also the key of a sample
    FLIP = 4
    CHECK = 5  # which samples' checksums are looked at
    TOP = 6
    LEFT = 7
    PATCH_ORDER = 8  # which patches are masked, and how
    OPERATION = 9  # the keys of an operation on images
    MIXED_BATCH = 20
    MIXED = 21
    CUT = 22
    RADIUS = 23
    ANGLE = 24
    ROW = 25
    COLUMN = 26
    VIEW = 27
    KEPT = 28  # which patches are kept
    REMOVED = 29  # the order of patches, of which the first are kept and the others removed
    RESIZED = 30  # a resized crop, by attempt and number
    DIRECTION = 31  # the components of directions
    PATH = 32  # which branches of a model drop path leaves out
    MASKED = 40  # which crops of a group are masked
    BLOCK = 41  # blocks of masked patches, by attempt and number
    STRETCH = 42  # the numbers of rows and columns that rotate tokens
    BEIT_BLOCK = 50  # the same, as BEiT draws them


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 values of any shape: a bijection of the 64-bit integers."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def combine(*parts: int) -> np.uint64:
    """One 64-bit hash of several non-negative integers, in order."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.array([part], np.uint64))
    return state[0]


def hashes(count: int, *parts: int) -> np.ndarray:
    """The hashes of `parts` with each of 0 .. count - 1, uint64 (count,)."""
    return mix(mix(np.arange(count, dtype=np.uint64)) ^ combine(*parts))


def orders(keys: np.ndarray, count: int, *parts: int) -> np.ndarray:
    """A random order of 0 .. count - 1 for each key (B,) uint64, for the purpose named by `parts`; int64 (B, count)."""
    own = mix(keys ^ combine(*parts))
    # `mix` is a bijection: no two numbers have the same hash.
    return np.argsort(mix(own[:, None] ^ np.arange(count, dtype=np.uint64)), axis=1)


def permutation(count: int, *parts: int) -> np.ndarray:
    """A permutation of 0 .. count - 1 as a function of `parts`; int64 (count,)."""
    # `mix` is a bijection, hence no two keys are equal and any sort gives this order; the default is the fastest.
    return np.argsort(hashes(count, *parts))


def places_in_permutation(indices: np.ndarray, count: int, *parts: int) -> np.ndarray:
    """Where `permutation(count, *parts)` puts each of some indices, int64 (n,): its inverse, without sorting it."""
    of_all = hashes(count, *parts)
    by_hash = np.argsort(of_all[indices])
    # For every hash, how many wanted ones are at most as large; from this, how many of all are below each wanted one.
    above = np.searchsorted(of_all[indices][by_hash], of_all, side="right")
    places = np.empty(len(indices), np.int64)
    places[by_hash] = np.cumsum(np.bincount(above, minlength=len(indices) + 1))[:-1]
    return places


def operation_keys(keys: np.ndarray, index: int) -> np.ndarray:
    """Keys of the samples' randomness for the operation at this index of `data.operations`, uint64 (B,)."""
    return _hashed(keys, (Purpose.OPERATION, index))


def uniform(keys: np.ndarray, *purpose: int) -> np.ndarray:
    """Uniform random numbers in [0, 1), float64, in the shape of the keys."""
    return (_hashed(keys, purpose) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stratum(keys: np.ndarray, count: int, *purpose: int) -> np.ndarray:
    """A uniform random integer from 0 to count - 1 for each key, int64: the stratum of the key's hash."""
    return strata(_hashed(keys, purpose), count)


def _hashed(keys: np.ndarray, purpose: Sequence[int]) -> np.ndarray:
    return mix(keys.view(np.uint64) ^ combine(*purpose))


def kept_paths(keys: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Which of P branches stay, each left out for its share of the keys (...): bool (..., P)."""
    own = _hashed(keys, (Purpose.PATH,))[..., None] ^ np.arange(len(shares), dtype=np.uint64)
    return uniform(own, Purpose.PATH) >= np.asarray(shares)


def stretches(key: int, grid: int, count: int, rescale: float, jitter: float) -> np.ndarray:
    """Factors of row and column in each of `count` blocks, for `grid` patches a side: float64 (count, 2).

    One for both, uniform in the logarithm from 1 / rescale to rescale, times one for each from 1 / jitter to jitter.
    """
    drawn = uniform(hashes(3 * count, key, grid), Purpose.STRETCH).reshape(count, 3)
    return between_ratios((1 / rescale, rescale), drawn[:, :1]) * between_ratios((1 / jitter, jitter), drawn[:, 1:])


def strata(hashed: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` equal parts of the uint64 range each value lies in, by its upper 32 bits; int64."""
    return ((hashed >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def normal(keys: np.ndarray, *purpose: int) -> np.ndarray:
    """Normal random numbers of mean 0 and variance 1, float64, in the shape of the keys.

    Each is one of 65,536 equally likely values, up to 4.3 from 0.
    """
    return normal_quantiles()[_hashed(keys, purpose) >> np.uint64(64 - _NORMAL_BITS)]


@cache
def normal_quantiles() -> np.ndarray:
    """The medians of 65,536 equally likely parts of a normal distribution, float64 (65536,), in multiples of 2^-12.

    The rounding removes any difference between the logarithms of two libraries: no value is close to the middle
    between two multiples.
    """
    distribution, count = NormalDist(), 2**_NORMAL_BITS
    upper = [distribution.inv_cdf((index + 0.5) / count) for index in range(count // 2, count)]
    rounded = np.rint(np.array(upper) / _NORMAL_UNIT) * _NORMAL_UNIT
    return np.concatenate([-rounded[::-1], rounded])


def between(limits: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), scaled to the limits [low, high)."""
    low, high = limits
    return low + (high - low) * drawn


def between_ratios(limits: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """The same, but uniform in the logarithm: low * (high / low) ** drawn, using the first 24 bits of `drawn`."""
    low, high = limits
    power, found, rest = np.float64(high / low), np.full(drawn.shape, low), drawn
    for _ in range(24):
        power, rest = np.sqrt(power), 2 * rest
        is_one = rest >= 1
        found, rest = np.where(is_one, found * power, found), rest - is_one
    return found
