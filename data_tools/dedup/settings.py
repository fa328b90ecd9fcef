"""Thresholds of what counts as a copy, set for each test set: small, drawn and medical pictures differ from photos."""

from dataclasses import dataclass
from typing import Literal

from vitscale.ground.errors import RecipeError

Preset = Literal["photo", "small", "exact"]

FLAT = 50  # the quality below which hashes say little, as PDQ's authors advise

# All pairs up to this distance are counted, so that the tail of pairs that are not copies can be seen.
COUNTED = 90
# A user's model judges pairs up to this distance, even if the preset compares only nearer pairs by correlation.
EMBEDDED = 80


@dataclass(frozen=True)
class Settings:
    """Thresholds for one test set. Raises RecipeError for values out of range."""

    near: bool = True  # whether perceptual hashes are compared at all; if not, only equal bytes and pixels are copies
    distance: int = 31  # bits up to which a hash alone decides (PDQ's authors: 31)
    candidates: int = 80  # bits up to which the pictures themselves are compared
    correlation: float = 0.92  # that candidates must reach
    min_quality: int = FLAT  # pictures whose hash has less are too flat: only equal bytes and pixels decide
    # With a model, the cosine of whitened features that candidates, and pairs up to 80 bits, may reach instead.
    cosine: float = 0.85

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("distance", self.distance, 0, self.candidates),
            ("candidates", self.candidates, 0, COUNTED),
            ("correlation", self.correlation, 0, 1),
            ("cosine", self.cosine, 0, 1),
            ("min_quality", self.min_quality, 0, 100),
        ):
            if not low <= value <= high:
                what = "candidates, " if name == "distance" else ""
                raise RecipeError(f"{name} {value}; expected {low} to {what}{high}")


# Measured in docs/LOG.md: recall by kind of edit, pairs of different photos, and CIFAR-10's judged near-duplicates.
PRESETS: dict[Preset, Settings] = {"photo": Settings(), "small": Settings(candidates=64), "exact": Settings(near=False)}
SMALL_SIDE = 96  # pixels; test sets whose shorter side is usually below this are small
