"""How far an accuracy that was counted on so many images may be from the true one."""

import re
from collections.abc import Mapping
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)
_OF_IMAGES = re.compile(r"(?:.*/)?(?:([a-z]+)_)?top\d+(?:_of_[a-z]+)?")  # shares of the images, and of which of them


def wilson_interval(share: float, samples: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share of `samples`, at least one: what a score test does not reject."""
    middle, spread = share + _Z**2 / (2 * samples), share * (1 - share) / samples + (_Z / (2 * samples)) ** 2
    half, scale = _Z * spread**0.5, 1 + _Z**2 / samples
    return min(share, max(0.0, (middle - half) / scale)), max(share, min(1.0, (middle + half) / scale))


def accuracy_intervals(values: Mapping[str, float], samples: int | None = None) -> dict[str, tuple[float, float]]:
    """The intervals of those metrics, by name, that are shares of images; means over classes or draws have none.

    `samples` among the values is the number of images, else the argument; `real_samples` is that of `real_top1`.
    """
    intervals = {}
    for name, value in values.items():
        if share := _OF_IMAGES.fullmatch(name):
            count = values.get(f"{share[1]}_samples" if share[1] else "samples", samples)
            if count and 0 <= value <= 1:
                intervals[name] = wilson_interval(value, int(count))
    return intervals
