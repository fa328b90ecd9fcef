"""The result of comparing an image with a test image, and the tiers that decide it.

From certain and cheap to careful:

bytes         the file's bytes equal a test image's
pixels        the decoded pixels are equal
hash          the PDQ hashes differ in hardly a bit
correlation   the hashes are near, and the aligned pictures correlate
embedding     the hashes are near, and a user's model finds the pictures alike
"""

from dataclasses import dataclass
from typing import Literal, get_args

Tier = Literal["bytes", "pixels", "hash", "correlation", "embedding"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True)
class Match:
    """A query and a test image that are copies, or nearly so.

    Attributes:
        test_set: number of the test set in the matcher's `test_sets`.
        key: the test image's key.
        image: its row in its index.
        tier: the tier that decided, or for a near miss the last one that was tried.
        distance: bits between the hashes; None if they were not compared, or are not near.
        correlation, cosine: None if they were not needed.
        variant: the test image's nearest variant, as `variant_name` understands it.
        removed: whether the query is to be removed because of this match.
    """

    test_set: int
    key: str
    image: int
    tier: Tier
    distance: int | None = None
    correlation: float | None = None
    cosine: float | None = None
    variant: int | None = None
    removed: bool = True
