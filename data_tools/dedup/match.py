"""The result of comparing an image with a test image, and the tiers that decide it.

From the certain and cheap to the careful:

bytes         the file's bytes are a test image's
pixels        the decoded pixels are
hash          the PDQ hashes differ in hardly a bit
correlation   the hashes are near, and the pictures, laid over each other, correlate
embedding     the hashes are near, and a user's model finds the pictures alike
"""

from dataclasses import dataclass
from typing import Literal, get_args

Tier = Literal["bytes", "pixels", "hash", "correlation", "embedding"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True)
class Match:
    """A query and a test image that are copies, or nearly are.

    Attributes:
        test_set: number of the test set in the matcher's `test_sets`.
        key: of the test image.
        image: its row in the set's index.
        tier: what decided, or would have last.
        distance: bits between the hashes; None where they are not compared, or not near.
        correlation, cosine: None where they were not needed.
        variant: of the test image that was nearest, as `variant_name` understands it.
        removed: whether the query is to be removed because of it.
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
