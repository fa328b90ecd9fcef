"""Counts of a comparison for each test set; the counts of several workers add up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.dedup.match import Match
from data_tools.dedup.settings import COUNTED

BINS = 100  # for the correlation, from 0 to 1


@dataclass
class Tally:
    """The counts of a comparison.

    Attributes:
        names: names of the S test sets.
        images: number of images compared.
        removed: number of images that match any test set.
        tiers: for each test set, the number of images that match it, by each image's strongest tier.
        contaminated: for each test set, the index rows of its images that any image matches.
        distances: int64 (S, 91): pairs of an image and a test image by the distance of their nearest hashes.
        correlations: int64 (S, 100): candidates that the hash did not decide, by correlation; below 0 counts as 0.
    """

    names: tuple[str, ...]
    images: int
    removed: int
    tiers: list[Counter[str]]
    contaminated: list[set[int]]
    distances: np.ndarray
    correlations: np.ndarray

    @classmethod
    def empty(cls, names: Sequence[str]) -> "Tally":
        count = len(names)
        distances, correlations = np.zeros((count, COUNTED + 1), np.int64), np.zeros((count, BINS), np.int64)
        return cls(tuple(names), 0, 0, [Counter() for _ in names], [set() for _ in names], distances, correlations)

    def add_distances(self, test_set: int, distances: np.ndarray) -> None:
        self.distances[test_set] += np.bincount(distances, minlength=COUNTED + 1)

    def add_correlation(self, test_set: int, correlation: float) -> None:
        self.correlations[test_set, min(BINS - 1, max(0, int(correlation * BINS)))] += 1

    def add_images(self, matches: Sequence[Sequence[Match]]) -> None:
        """Count images with their matches, sorted by test set and tier."""
        self.images += len(matches)
        for of_image in matches:
            strongest: dict[int, str] = {}
            for match in of_image:
                if match.removed:
                    strongest.setdefault(match.test_set, match.tier)
                    self.contaminated[match.test_set].add(match.image)
            for test_set, tier in strongest.items():
                self.tiers[test_set][tier] += 1
            self.removed += bool(strongest)

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally, of the same test sets."""
        self.images += other.images
        self.removed += other.removed
        for ours, theirs in zip(self.tiers, other.tiers, strict=True):
            ours.update(theirs)
        for our_rows, their_rows in zip(self.contaminated, other.contaminated, strict=True):
            our_rows.update(their_rows)
        self.distances += other.distances
        self.correlations += other.correlations

    def to_json(self) -> dict[str, Any]:
        """Plain values; zeros are left out."""
        return {
            "names": list(self.names),
            "images": self.images,
            "removed": self.removed,
            "tiers": [dict(tiers) for tiers in self.tiers],
            "contaminated": [sorted(rows) for rows in self.contaminated],
            "distances": [_sparse(row) for row in self.distances],
            "correlations": [_sparse(row) for row in self.correlations],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Tally":
        """The inverse of `to_json`."""
        tally = cls.empty(content["names"])
        tally.images, tally.removed = content["images"], content["removed"]
        tally.tiers = [Counter(tiers) for tiers in content["tiers"]]
        tally.contaminated = [set(rows) for rows in content["contaminated"]]
        for name in ("distances", "correlations"):
            for row, counts in zip(getattr(tally, name), content[name], strict=True):
                for position, count in counts.items():
                    row[int(position)] = count
        return tally


def _sparse(row: np.ndarray) -> dict[str, int]:
    return {str(position): int(row[position]) for position in np.flatnonzero(row)}
