"""Counter-based randomness: 64-bit hashes of small integers, the same on every machine and library version.

NumPy reserves the right to change what its generators draw from one version to the next; sample order and augmentation
must not change with it.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


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
