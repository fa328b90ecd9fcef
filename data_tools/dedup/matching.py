"""Decides whether an image is a copy of a test image, by the tiers of `matches.py` in order.

Near hashes are found by comparing every pair, so that none is missed. An index of test sets is small (millions of
hashes) and a comparison is one instruction a word, so going through all of them beats every clever structure: 7 * 10^9
pairs a second and core with AVX-512, five times faiss's flat index.

They say that one picture may be a crop of the other, and roughly which crop. From there, the window in the test image
is moved, scaled and turned a little until the query fits best (Gauss-Newton on the squared difference, with brightness
and contrast free; Baker and Matthews, "Lucas-Kanade 20 Years On", 2004). Copies then correlate above 0.95. Without
this, a crop that is 2 % off reaches 0.8, and so do two different shirts on a white ground.

Uniform borders are left out: two pale pictures in one kind of frame correlate by their frames.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from data_tools.dedup.embedding import Embedder, cosine, unit_vector, whitened
from data_tools.dedup.fingerprint import HASH_BYTES, SIDE, Window
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import BINS, TIERS, Findings, Match, Tier
from data_tools.dedup.queries import Query
from data_tools.dedup.settings import COUNTED, EMBEDDED, Settings
from data_tools.dedup.variants import window_of
from vitscale.ground import native
from vitscale.ground.errors import RecipeError

# Pairs that miss the required correlation (or cosine) by no more than this are reported as well.
NEAR_MISS = 0.15
_ALIGNED = 2  # the nearest variants of an image that are aligned with a query
BITS = 256
_ROOM = 1 << 16
_GRID = 32  # pixels per side that are compared
_MARGIN = 1.0  # pixels of 64 beside a border that are left out too, because it bleeds into them


class _Near(NamedTuple):
    """A query and a test image with near hashes: distances and variants of the nearest ones, in order."""

    query: int
    image: int
    distances: list[int]
    variants: list[int]
    trimmed: list[bool]


class Matcher:
    """Compares images with the test sets of some indexes, in order, and adds to `findings`, which can be set."""

    def __init__(self, indexes: Sequence[FingerprintIndex], embedder: Embedder | None = None) -> None:
        """`embedder` is the model of indexes with vectors. Raises RecipeError if two test sets have the same name."""
        self.indexes = tuple(indexes)
        self.test_sets = tuple(one for index in indexes for one in index.test_sets)
        self.names = tuple(one.name for one in self.test_sets)
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise RecipeError(f"the test set {', '.join(twice)} is in several indexes, or twice in one: give it once")
        starts = accumulate((len(index.test_sets) for index in indexes), initial=0)
        self._searches = [_Search(index, first, embedder) for index, first in zip(indexes, starts, strict=False)]
        self.findings = Findings(self.names)

    def index_of(self, test_set: int) -> FingerprintIndex:
        """The index that contains a test set."""
        return next(search.index for search in self._searches if test_set < search.first_set + search.sets)

    def match(self, queries: Sequence[Query]) -> list[list[Match]]:
        """The matches of each query: removed ones and near misses. Fastest with some dozens of queries at a time."""
        matches: list[list[Match]] = [[] for _ in queries]
        for search in self._searches:
            search.add(queries, matches, self.findings)
        for of_query in matches:
            of_query.sort(key=lambda match: (match.test_set, TIERS.index(match.tier), match.key))
        self.findings.add_images(queries, matches)
        return matches


class _Search:
    """One index, ready to be searched. Its test sets are numbered from `first_set`."""

    def __init__(self, index: FingerprintIndex, first_set: int, embedder: Embedder | None) -> None:
        self.index, self.first_set, self.sets = index, first_set, len(index.test_sets)
        self._settings = [one.settings for one in index.test_sets]
        content = b"".join(digest[:8] for digest in index.images["sha256"].to_pylist())
        self._bytes = _Exact(np.frombuffer(content, "<u8"), np.arange(len(index.images)))
        pixels = index.images["pixels"]
        self._pixels = _Exact(pixels.drop_null().to_numpy(), np.flatnonzero(pixels.is_valid().to_numpy()))
        self._embedder = None if index.embedding is None else embedder

    def add(self, queries: Sequence[Query], matches: list[list[Match]], findings: Findings) -> None:
        """Add each query's matches to `matches`."""
        exact = [self._exact(query) for query in queries]
        distances: dict[tuple[int, int], int] = {}
        for number in range(self.sets):
            if self._settings[number].near:
                for pair in self._near_pairs(queries, number, findings):
                    if pair.image in exact[pair.query]:
                        distances[pair.query, pair.image] = pair.distances[0]
                        continue
                    match = self._judged(queries[pair.query], pair, number, findings)
                    if match is not None:
                        matches[pair.query].append(match)
        for position, found in enumerate(exact):
            for image, tier in found.items():
                matches[position].append(
                    Match(
                        test_set=self.first_set + self.index.set_of(image),
                        key=self.index.keys[image].as_py(),
                        image=image,
                        tier=tier,
                        distance=distances.get((position, image)),
                    )
                )

    def _exact(self, query: Query) -> dict[int, Tier]:
        found: dict[int, Tier] = {}
        if query.pixels is not None:
            found |= dict.fromkeys(self._pixels.rows(query.pixels), "pixels")
        digests = self.index.images["sha256"]
        candidates = self._bytes.rows(int.from_bytes(query.sha256[:8], "little"))
        return found | {row: "bytes" for row in candidates if digests[row].as_py() == query.sha256}

    def _near_pairs(self, queries: Sequence[Query], number: int, findings: Findings) -> list[_Near]:
        """Queries and images of a test set with near hashes; the findings get all within `COUNTED` bits."""
        settings = self._settings[number]
        asked = [(i, query.pdq, False) for i, query in enumerate(queries) if query.quality >= settings.min_quality]
        asked += [(i, pdq, True) for i, _, _ in asked if (pdq := queries[i].pdq_trimmed) is not None]
        if not asked:
            return []
        hashes = np.frombuffer(b"".join(pdq for _, pdq, _ in asked), np.uint8).reshape(-1, HASH_BYTES)
        first, end = self.index.first_hashes[number : number + 2].tolist()
        rows, hits, distances = near_pairs(words(hashes), self.index.hashes, COUNTED, first, end)
        if not len(rows):
            return []
        of_query = np.array([i for i, _, _ in asked])[rows]
        images = self.index.owners[hits].astype(np.int64)
        order = np.lexsort((hits, distances, images, of_query))
        of_query, images, distances, hits, rows = (a[order] for a in (of_query, images, distances, hits, rows))
        begins = np.flatnonzero(np.diff(of_query, prepend=-1) | np.diff(images, prepend=-1))
        findings.distances[self.first_set + number] += np.bincount(distances[begins], minlength=COUNTED + 1)
        pairs = []
        for begin, after in pairwise([*begins.tolist(), len(images)]):
            if distances[begin] > self._limit(settings):
                continue
            some = slice(begin, min(after, begin + _ALIGNED))
            pairs.append(
                _Near(
                    query=int(of_query[begin]),
                    image=int(images[begin]),
                    distances=distances[some].tolist(),
                    variants=self.index.variants[hits[some]].tolist(),
                    trimmed=[asked[row][2] for row in rows[some]],
                )
            )
        return pairs

    def _judged(self, query: Query, pair: _Near, number: int, findings: Findings) -> Match | None:
        """The match of a pair with near hashes; None if it is not worth reporting."""
        settings, index, image = self._settings[number], self.index, pair.image
        height, width, trim = index.size(image)
        inside = None if trim is None else Window.of(trim, height, width)
        reached, counted, decided = -1.0, -1.0, False
        for distance, variant, trimmed in zip(pair.distances, pair.variants, pair.trimmed, strict=True):
            if distance > self._limit(settings):
                continue
            window = window_of(variant, height, width, trim)
            fit = correlation(
                query.luma(trimmed),
                index.thumbnails[image],
                window,
                mirrored=variant % 2 == 1,
                inside_query=None if trimmed else query.inside,
                inside_image=inside,
            )
            reached = max(reached, fit)
            counted = max(counted, fit if distance <= settings.candidates else -1.0)
            # A frame can dominate a hash, so a hash that includes one decides nothing by itself.
            is_bare = (trimmed or query.inside is None) and (inside is None or window == inside)
            decided = decided or (is_bare and distance <= settings.distance)
        distance, alike = pair.distances[0], None
        tier: Tier = "hash" if decided else "correlation"
        removed = decided or counted >= settings.correlation
        if tier == "correlation" and distance <= settings.candidates:
            findings.correlations[self.first_set + number, min(BINS - 1, max(0, int(counted * BINS)))] += 1
        if not removed and self._embedder is not None:
            tier = "embedding"
            alike = self._cosine(query, image, is_mirrored=pair.variants[0] % 2 == 1)
            removed = alike >= settings.cosine
        is_far = reached < settings.correlation - NEAR_MISS and (alike or 0.0) < settings.cosine - NEAR_MISS
        if is_far and not removed:
            return None
        return Match(
            test_set=self.first_set + number,
            key=index.keys[image].as_py(),
            image=image,
            tier=tier,
            distance=distance,
            correlation=reached,
            cosine=alike,
            variant=pair.variants[0],
            removed=removed,
        )

    def _limit(self, settings: Settings) -> int:
        """The distance in bits up to which pairs are judged at all; beyond `candidates`, only a model judges them."""
        return settings.candidates if self._embedder is None else max(settings.candidates, EMBEDDED)

    def _cosine(self, query: Query, image: int, is_mirrored: bool) -> float:
        """The model's cosine, to three decimals; of the mirrored query if the nearest variant is mirrored."""
        whitening, vectors = self.index.whitening, self.index.embeddings
        assert self._embedder is not None and whitening is not None and vectors is not None
        rgb = query.rgb()[:, ::-1] if is_mirrored else query.rgb()
        return cosine(whitened(unit_vector(self._embedder, rgb)[None], whitening)[0], vectors[image])


class _Exact:
    """Sorted 64-bit numbers, with the row of each."""

    def __init__(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        order = np.argsort(numbers, kind="stable")
        self._numbers, self._rows = numbers[order], rows[order]

    def rows(self, number: int) -> list[int]:
        wanted = np.uint64(number)
        begin = np.searchsorted(self._numbers, wanted, side="left")
        end = np.searchsorted(self._numbers, wanted, side="right")
        return self._rows[begin:end].tolist()


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


def correlation(
    query: np.ndarray,
    image: np.ndarray,
    window: Window,
    *,
    mirrored: bool,
    inside_query: Window | None = None,
    inside_image: Window | None = None,
) -> float:
    """The correlation of a query with a window of a test image, or with the best-fitting window near it.

    Args:
        query, image: uint8 (64, 64), lumas of the whole pictures.
        window: the part of the image that the query is thought to show.
        mirrored: whether the query shows it mirrored.
        inside_query, inside_image: the part of each picture within its borders; None if it has no border.

    Returns Pearson's correlation of the pixels, -1 to 1, three decimals; 0 where there is no contrast, or hardly
    anything but border.
    """
    width = -window.width if mirrored else window.width
    start = np.array(
        [
            *((window.top + window.height / 2) * SIDE - 0.5, 0.0, window.height * SIDE),
            *((window.left + window.width / 2) * SIDE - 0.5, width * SIDE, 0.0),
        ],
        np.float32,
    )
    seen = _pixels(inside_query, _GRID) if inside_query is not None else _ALL
    box = _pixels(inside_image, SIDE) if inside_image is not None else _ALL
    arrays = np.ascontiguousarray(query), np.ascontiguousarray(image), start, seen, box
    return round(native.load().vitscale_aligned(*(array.ctypes.data for array in arrays)), 3)


_ALL = np.array([-np.inf, -np.inf, np.inf, np.inf], np.float32)


def _pixels(inside: Window, side: int) -> np.ndarray:
    """float32 (4,): the pixel positions that enclose the part within the borders: top, left, bottom, right."""
    margin = _MARGIN * side / SIDE
    top, left = inside.top * side, inside.left * side
    bottom, right = top + inside.height * side, left + inside.width * side
    # A picture's own edge needs no margin.
    return np.array(
        [
            top + margin - 0.5 if inside.top > 0 else -np.inf,
            left + margin - 0.5 if inside.left > 0 else -np.inf,
            bottom - margin - 0.5 if bottom < side else np.inf,
            right - margin - 0.5 if right < side else np.inf,
        ],
        np.float32,
    )
