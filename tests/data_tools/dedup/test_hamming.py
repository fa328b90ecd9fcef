import numpy as np
import pytest

from data_tools.dedup.matching import near_pairs, words
from vitscale.ground import native

faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")


def made_hashes(count: int, seed: int) -> np.ndarray:
    """uint8 (count, 32): some at random, most of them a few or many bits away from one of a handful."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).integers(0, 2, (7, 256), np.uint8)
    flips = rng.random((count, 256)) < rng.uniform(0, 0.4, (count, 1))
    return np.packbits(centres[rng.integers(0, 7, count)] ^ flips, axis=1)


def by_query(queries: np.ndarray, hits: np.ndarray, distances: np.ndarray) -> list[tuple[int, int, int]]:
    return sorted(zip(queries.tolist(), hits.tolist(), distances.tolist(), strict=True))


def of_faiss(queries: np.ndarray, index: np.ndarray, limit: int) -> list[tuple[int, int, int]]:
    flat = faiss.IndexBinaryFlat(256)
    flat.add(index)
    ends, distances, hits = flat.range_search(queries, limit + 1)  # it wants less than
    return by_query(np.repeat(np.arange(len(queries)), np.diff(ends.astype(np.int64))), hits, distances)


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2048, 3000])
@pytest.mark.parametrize("limit", [0, 31, 90])
def test_finds_the_pairs_that_faiss_finds(size, limit):
    index, queries = made_hashes(size, 1), made_hashes(40, 2)
    index[::5] = queries[np.arange(len(index[::5])) % 40]  # equal ones, too
    found = by_query(*near_pairs(words(queries), words(index), limit))
    assert found == of_faiss(queries, index, limit)
    assert found


def test_distances_are_counts_of_unequal_bits():
    index, queries = made_hashes(1500, 3), made_hashes(11, 4)
    unequal = (np.unpackbits(queries, axis=1)[:, None] != np.unpackbits(index, axis=1)[None]).sum(-1)
    rows, hits, distances = near_pairs(words(queries), words(index), 60)
    assert by_query(rows, hits, distances) == by_query(*np.nonzero(unequal <= 60), unequal[unequal <= 60])
    assert rows.dtype == hits.dtype == np.int64 and distances.dtype == np.int16


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1024), (1, 1025), (1000, 2000), (1024, 2500), (700, 700), (2500, None)]
)
def test_looks_at_a_part_of_the_index_only(start, stop):
    index, queries = made_hashes(2500, 5), made_hashes(20, 6)
    expected = [pair for pair in of_faiss(queries, index, 90) if start <= pair[1] < (2500 if stop is None else stop)]
    assert by_query(*near_pairs(words(queries), words(index), 90, start, stop)) == expected


def test_more_pairs_than_there_was_room_for():
    index, queries = made_hashes(2000, 7), made_hashes(50, 8)
    rows, hits, distances = near_pairs(words(queries), words(index), 256)
    assert len(rows) == 100_000
    assert by_query(rows, hits, distances) == of_faiss(queries, index, 256)


def test_nothing_to_compare():
    none, some = words(np.empty((0, 32), np.uint8)), words(made_hashes(3, 9))
    assert none.shape == (4, 0)
    for queries, index in ((none, some), (some, none), (none, none)):
        assert [len(column) for column in near_pairs(queries, index, 256)] == [0, 0, 0]


@pytest.mark.parametrize("kind", [1, 2])
def test_processors_without_newer_instructions_find_the_same(kind):
    index, queries = words(made_hashes(2501, 1)), words(made_hashes(40, 2))
    sides = queries.ctypes.data, 40, index.ctypes.data, 2501
    pairs = np.empty((100_000, 3), np.int64)
    found = native.load().vitscale_near_pairs(*sides, 90, 1, 2500, pairs.ctypes.data, len(pairs), kind)
    assert by_query(*pairs[:found].T) == by_query(*near_pairs(queries, index, 90, 1, 2500))
