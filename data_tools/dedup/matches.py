"""What comparisons with test sets find: matches, their counts, and the pairs closest to the thresholds.

The tiers that decide, from certain and cheap to careful:

bytes         the file's bytes equal a test image's
pixels        the decoded pixels are equal
hash          the PDQ hashes differ in hardly a bit
correlation   the hashes are near, and the aligned pictures correlate
embedding     the hashes are near, and a user's model finds the pictures alike
"""

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from data_tools.dedup.queries import Query
from data_tools.dedup.settings import COUNTED

Tier = Literal["bytes", "pixels", "hash", "correlation", "embedding"]
TIERS: tuple[Tier, ...] = get_args(Tier)
BINS = 100  # for the correlation, from 0 to 1
KEPT = 24  # closest pairs per test set and side of its threshold


@dataclass(frozen=True)
class Match:
    """A query and a test image that are copies, or nearly so."""

    test_set: int  # number of the test set in the matcher's `test_sets`
    key: str  # the test image's
    image: int  # its row in its index
    tier: Tier  # the tier that decided, or for a near miss the last one that was tried
    distance: int | None = None  # bits between the hashes; None if they were not compared, or are not near
    correlation: float | None = None  # None if it was not needed
    cosine: float | None = None  # likewise
    variant: int | None = None  # the test image's nearest variant, as `variant_name` understands it
    removed: bool = True  # whether the query is to be removed because of this match


@dataclass(frozen=True)
class Pair:
    """A match whose pictures were compared, the key of its query, and a small JPEG of that.

    People should check those nearest to the threshold, on both sides of it, before they trust it.
    """

    match: Match
    train_key: str
    picture: bytes

    @property
    def order(self) -> tuple[float, int, str, str]:
        """Sort key, most doubtful first: of removed pairs the least alike, of the others the most alike."""
        match, sign = self.match, 1 if self.match.removed else -1
        assert match.correlation is not None and match.distance is not None
        return sign * match.correlation, -sign * match.distance, self.train_key, match.key


class Findings:
    """The counts and closest pairs of a comparison with S test sets, given by their names; those of tasks add up."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.images = 0  # compared
        self.removed = 0  # of them, those that match any test set
        # For each test set, the number of images that match it, by each image's strongest tier.
        self.tiers: list[Counter[str]] = [Counter() for _ in names]
        # For each test set, the index rows of its images that any image matches.
        self.contaminated: list[set[int]] = [set() for _ in names]
        # int64 (S, 91): pairs of an image and a test image by the distance of their nearest hashes.
        self.distances = np.zeros((len(names), COUNTED + 1), np.int64)
        # int64 (S, 100): candidates that the hash did not decide, by correlation; below 0 counts as 0.
        self.correlations = np.zeros((len(names), BINS), np.int64)
        self._closest: dict[tuple[int, bool], list[Pair]] = {}

    def add_images(self, queries: Sequence[Query], matches: Sequence[Sequence[Match]]) -> None:
        """Count images with their matches, sorted by test set and tier, and keep the closest pairs."""
        self.images += len(queries)
        for query, of_image in zip(queries, matches, strict=True):
            strongest: dict[int, str] = {}
            for match in of_image:
                if match.removed:
                    strongest.setdefault(match.test_set, match.tier)
                    self.contaminated[match.test_set].add(match.image)
                self._add_match(query, match)
            for test_set, tier in strongest.items():
                self.tiers[test_set][tier] += 1
            self.removed += bool(strongest)

    def pairs(self, test_set: int, removed: bool) -> list[Pair]:
        """The closest pairs on one side of a test set's threshold, nearest first, in whatever order they were added."""
        return list(self._closest.get((test_set, removed), []))

    def add(self, other: "Findings") -> None:
        """Add what was found with the same test sets elsewhere."""
        self.images += other.images
        self.removed += other.removed
        for ours, theirs in zip(self.tiers, other.tiers, strict=True):
            ours.update(theirs)
        for our_rows, their_rows in zip(self.contaminated, other.contaminated, strict=True):
            our_rows.update(their_rows)
        self.distances += other.distances
        self.correlations += other.correlations
        for side in other._closest.values():
            for pair in side:
                self._add_pair(pair)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "tally": {
                "names": list(self.names),
                "images": self.images,
                "removed": self.removed,
                "tiers": [dict(tiers) for tiers in self.tiers],
                "contaminated": [sorted(rows) for rows in self.contaminated],
                "distances": self.distances.tolist(),
                "correlations": self.correlations.tolist(),
            },
            "closest": [
                asdict(pair) | {"picture": base64.b64encode(pair.picture).decode()}
                for _, side in sorted(self._closest.items())
                for pair in side
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Findings":
        """The inverse of `to_json`."""
        counts = content["tally"]
        findings = cls(counts["names"])
        findings.images, findings.removed = counts["images"], counts["removed"]
        findings.tiers = [Counter(tiers) for tiers in counts["tiers"]]
        findings.contaminated = [set(rows) for rows in counts["contaminated"]]
        findings.distances, findings.correlations = np.array(counts["distances"]), np.array(counts["correlations"])
        for pair in content["closest"]:
            findings._add_pair(Pair(Match(**pair["match"]), pair["train_key"], base64.b64decode(pair["picture"])))
        return findings

    def _add_match(self, query: Query, match: Match) -> None:
        """Keep a match if its pictures were compared and it is close enough; only then the query's picture is made."""
        if match.distance is None or match.correlation is None:
            return
        pair = Pair(match, query.key, b"")
        side = self._closest.get((match.test_set, match.removed), [])
        if len(side) < KEPT or pair.order < side[-1].order:
            self._add_pair(replace(pair, picture=query.picture()))

    def _add_pair(self, pair: Pair) -> None:
        side = self._closest.setdefault((pair.match.test_set, pair.match.removed), [])
        side.append(pair)
        side.sort(key=lambda one: one.order)
        del side[KEPT:]
