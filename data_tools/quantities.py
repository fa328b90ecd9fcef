"""Sizes as people write them."""

import re

from vitscale.errors import RecipeError

_BYTES = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = "kmgt"


def parse_bytes(text: str) -> int:
    """A size: `512MB` (10**6), `512MiB` (2**20), `1G`, `100000`. Raises RecipeError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1].replace("_", "")) == 0:
        raise RecipeError(f"{text!r} is no size; expected such as 512MB, 256MiB or 1.5GB")
    power = _POWERS.index(match[2].lower()) + 1 if match[2] else 0
    return max(1, round(float(match[1].replace("_", "")) * (1024 if match[3] else 1000) ** power))
