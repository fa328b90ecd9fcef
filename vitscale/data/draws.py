"""Random numbers as functions of samples' keys, and of nothing else: the same on every machine.

They take additions, multiplications and square roots, which every processor rounds alike, and no function of a library
that may round in another way in its next version.
"""

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from vitscale.data.hashing import combine, mix

_OPERATION = 9  # what a hash is for; see augmentation.py
_NORMAL_BITS = 16
_NORMAL_UNIT = 2.0**-12


def operation_keys(keys: np.ndarray, index: int) -> np.ndarray:
    """uint64 (B,): the bits of each sample's randomness for the operation at this index of `data.operations`."""
    return mix(keys ^ combine(_OPERATION, index))


def uniform(keys: np.ndarray, *purpose: int) -> np.ndarray:
    """Uniform in [0, 1), float64 of the shape of the uint64 keys."""
    return (mix(keys ^ combine(*purpose)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stratum(keys: np.ndarray, count: int, *purpose: int) -> np.ndarray:
    """In which of `count` equal parts of their range the hashes of the keys lie: int64, 0 to count - 1."""
    return strata(mix(keys ^ combine(*purpose)), count)


def strata(hashed: np.ndarray, count: int) -> np.ndarray:
    """In which of `count` equal parts of the range of uint64 these values lie, by their upper 32 bits; int64."""
    return ((hashed >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def normal(keys: np.ndarray, *purpose: int) -> np.ndarray:
    """Of mean 0 and variance 1, float64 of the shape of the keys: one of 65,536 equally likely values, up to 4.3."""
    return normal_quantiles()[mix(keys ^ combine(*purpose)) >> np.uint64(64 - _NORMAL_BITS)]


@cache
def normal_quantiles() -> np.ndarray:
    """float64 (65536,): the middle of each of so many equal parts of a normal distribution, in units of 2^-12.

    The rounding takes away in what the logarithms of two libraries may differ: no value is nearly between two units.
    """
    distribution, count = NormalDist(), 2**_NORMAL_BITS
    upper = [distribution.inv_cdf((index + 0.5) / count) for index in range(count // 2, count)]
    rounded = np.rint(np.array(upper) / _NORMAL_UNIT) * _NORMAL_UNIT
    return np.concatenate([-rounded[::-1], rounded])


def between(limits: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) as ones in [low, high), the limits."""
    low, high = limits
    return low + (high - low) * drawn


def between_ratios(limits: Sequence[float], drawn: np.ndarray) -> np.ndarray:
    """The same, but that logarithms are uniform: low * (high / low) ** drawn, of which 24 bits count."""
    low, high = limits
    power, found, rest = np.float64(high / low), np.full(drawn.shape, low), drawn
    for _ in range(24):
        power, rest = np.sqrt(power), 2 * rest
        is_one = rest >= 1
        found, rest = np.where(is_one, found * power, found), rest - is_one
    return found
