"""The pairs closest to the threshold, on both sides of it, for people to check before they trust it."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_tools.dedup.match import Match

KEPT = 24  # pairs per test set and side


@dataclass(frozen=True)
class Pair:
    """An image and a test image whose pictures were compared.

    Attributes:
        test_set, image: numbers of the test set and the test image, as in `match.Match`.
        train_key, test_key, tier, distance, correlation, cosine, removed: likewise.
        picture: a small JPEG of the image.
    """

    test_set: int
    image: int
    train_key: str
    test_key: str
    tier: str
    distance: int
    correlation: float
    cosine: float | None
    removed: bool
    picture: bytes

    @property
    def order(self) -> tuple[float, int, str, str]:
        """Sort key, most doubtful first: of removed pairs the least alike, of the others the most alike."""
        sign = 1 if self.removed else -1
        return sign * self.correlation, -sign * self.distance, self.train_key, self.test_key


class Closest:
    """A bounded number of pairs nearest to the threshold; the choice does not depend on the order of adding them."""

    def __init__(self, pairs: Sequence[Pair] = ()) -> None:
        self._pairs: dict[tuple[int, bool], list[Pair]] = {}
        for pair in pairs:
            self._add(pair)

    def add(self, train_key: str, matches: Sequence[Match], picture: Callable[[], bytes]) -> None:
        """Add those of an image's matches that are close enough; `picture` is called only if one is."""
        for match in matches:
            if match.distance is None or match.correlation is None:
                continue
            facts = (match.tier, match.distance, match.correlation, match.cosine, match.removed)
            pair = Pair(match.test_set, match.image, train_key, match.key, *facts, picture=b"")
            side = self._pairs.get((pair.test_set, pair.removed), [])
            if len(side) < KEPT or pair.order < side[-1].order:
                self._add(Pair(**asdict(pair) | {"picture": picture()}))

    def merge(self, other: "Closest") -> None:
        """Add another one's pairs where they are closer."""
        for side in other._pairs.values():
            for pair in side:
                self._add(pair)

    def pairs(self, test_set: int, removed: bool) -> list[Pair]:
        """One side of a test set's threshold, nearest first."""
        return list(self._pairs.get((test_set, removed), []))

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values."""
        return [
            asdict(pair) | {"picture": base64.b64encode(pair.picture).decode()}
            for _, side in sorted(self._pairs.items())
            for pair in side
        ]

    @classmethod
    def from_json(cls, content: list[dict[str, Any]]) -> "Closest":
        """The inverse of `to_json`."""
        return cls([Pair(**one | {"picture": base64.b64decode(one["picture"])}) for one in content])

    def _add(self, pair: Pair) -> None:
        side = self._pairs.setdefault((pair.test_set, pair.removed), [])
        side.append(pair)
        side.sort(key=lambda one: one.order)
        del side[KEPT:]
