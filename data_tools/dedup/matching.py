"""Decides whether an image is a copy of a test image, by the tiers of `matches.py` in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from data_tools.dedup.alignment import correlation
from data_tools.dedup.embedding import Embedder, cosine, unit_vector, whitened
from data_tools.dedup.hamming import near_pairs, words
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.luma import Window
from data_tools.dedup.matches import TIERS, Findings, Match, Tier
from data_tools.dedup.pdq import HASH_BYTES
from data_tools.dedup.queries import Query
from data_tools.dedup.settings import COUNTED, EMBEDDED, Settings
from data_tools.dedup.variants import window_of
from vitscale.ground.errors import RecipeError

# Pairs that miss the required correlation (or cosine) by no more than this are reported as well.
NEAR_MISS = 0.15
_ALIGNED = 2  # the nearest variants of an image that are aligned with a query


@dataclass(frozen=True)
class _Near:
    """A query and a test image with near hashes: distances and variants of the nearest ones, in order."""

    query: int
    image: int
    distances: list[int]
    variants: list[int]
    trimmed: list[bool]


class Matcher:
    """Compares images with the test sets of some indexes, in order, and adds to `findings`, which can be set."""

    def __init__(
        self,
        indexes: Sequence[FingerprintIndex],
        settings: dict[str, Settings] | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        """`settings`, by test set name, replace the index's; `embedder` is the model of indexes with vectors.

        Raises RecipeError if two test sets have the same name.
        """
        self.indexes = tuple(indexes)
        self.test_sets = tuple(one for index in indexes for one in index.test_sets)
        self.names = tuple(one.name for one in self.test_sets)
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise RecipeError(f"the test set {', '.join(twice)} is in several indexes, or twice in one: give it once")
        self.settings = tuple((settings or {}).get(one.name, one.settings) for one in self.test_sets)
        self._searches = []
        first = 0
        for index in indexes:
            count = len(index.test_sets)
            self._searches.append(_Search(index, first, self.settings[first : first + count], embedder))
            first += count
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

    def __init__(
        self, index: FingerprintIndex, first_set: int, settings: Sequence[Settings], embedder: Embedder | None
    ) -> None:
        self.index, self.first_set, self._settings, self.sets = index, first_set, settings, len(settings)
        self._bytes = _Exact.of_digests(index.images["sha256"])
        self._pixels = _Exact.of_numbers(index.images["pixels"])
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
        """Test images with the same bytes or pixels."""
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
        findings.add_distances(self.first_set + number, distances[begins])
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
            findings.add_correlation(self.first_set + number, counted)
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

    @classmethod
    def of_digests(cls, digests: pa.ChunkedArray) -> "_Exact":
        content = b"".join(digest[:8] for digest in digests.to_pylist())
        numbers = np.frombuffer(content, "<u8")
        return cls(numbers, np.arange(len(numbers)))

    @classmethod
    def of_numbers(cls, numbers: pa.ChunkedArray) -> "_Exact":
        rows = np.flatnonzero(numbers.is_valid().to_numpy())
        return cls(numbers.drop_null().to_numpy(), rows)

    def rows(self, number: int) -> list[int]:
        wanted = np.uint64(number)
        begin = np.searchsorted(self._numbers, wanted, side="left")
        end = np.searchsorted(self._numbers, wanted, side="right")
        return self._rows[begin:end].tolist()
