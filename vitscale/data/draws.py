"""Random numbers as functions of the samples' keys and of nothing else: the same on every machine.

Keys are uint64 or int64 arrays of any shape, of which only the bits count. A purpose is one or more non-negative
integers; draws for different purposes are independent. Purposes below 1,000 belong to the crop, the flip and the
objectives that come with vitscale, so an objective of another package uses those from 1,000 on. Each operation on
images has keys of its own and may use any purpose.

They use additions, multiplications and square roots, which every processor rounds alike, and no library function whose
rounding might change in the library's next version.
"""

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

from vitscale.data.hashing import combine, mix
from vitscale.data.purposes import Purpose

_NORMAL_BITS = 16
_NORMAL_UNIT = 2.0**-12


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
