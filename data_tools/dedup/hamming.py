"""Exact search for hashes within a Hamming distance: compares every pair, so that none is missed.

An index of test sets is small (millions of hashes) and a comparison is one instruction a word, so going through all of
them beats every clever structure: 5 * 10^9 pairs a second and core with AVX-512, four times faiss's flat index.
"""

import numpy as np

from vitscale.ground import native

BITS = 256
_ROOM = 1 << 16


def words(hashes: np.ndarray) -> np.ndarray:
    """Hashes, uint8 (N, 32), in the layout of the search: uint64 (4, N)."""
    return np.ascontiguousarray(np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 4).T)


def near_pairs(
    queries: np.ndarray, index: np.ndarray, limit: int, start: int = 0, stop: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of a query and an indexed hash that differ in at most `limit` bits.

    Args:
        queries: uint64 (4, Q), as `words` gives them.
        index: uint64 (4, N).
        start, stop: the range of the index's hashes to search; all by default.

    Returns the pairs' query numbers and hash numbers, int64, and distances, int16, in no particular order.
    """
    stop = index.shape[1] if stop is None else stop
    queries, index, found = np.ascontiguousarray(queries), np.ascontiguousarray(index), _ROOM
    while True:
        pairs = np.empty((found, 3), np.int64)
        sides = queries.ctypes.data, queries.shape[1], index.ctypes.data, index.shape[1]
        found = native.load().vitscale_near_pairs(*sides, limit, start, stop, pairs.ctypes.data, len(pairs), 0)
        if found <= len(pairs):
            break
    pairs = pairs[:found]
    return pairs[:, 0], pairs[:, 1], pairs[:, 2].astype(np.int16)
