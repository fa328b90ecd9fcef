"""Parses counts and sizes as people write them: `9M`, `512MiB`."""

import re
from decimal import Decimal

from vitscale.ground.errors import RecipeError

_BYTES = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = "kmgt"
_COUNT = re.compile(r"([0-9][0-9_]{0,20}(?:\.[0-9]{1,9})?)([kmb]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def parse_count(text: str) -> int:
    """`9M` -> 9,000,000; also `30k`, `1.5M`, `1B`, `1_000`. Raises RecipeError unless it is a whole number above 0."""
    match = _COUNT.fullmatch(text.strip())
    number = Decimal(match[1].replace("_", "")) * _UNITS[match[2].lower()] if match else Decimal(0)
    if number < 1 or number != int(number):
        raise RecipeError(f"{text!r} is not a number of images: expected a whole number from 1, such as 9M, 30k, 1_000")
    return int(number)


def parse_bytes(text: str) -> int:
    """A size in bytes: `512MB` (10**6 each), `512MiB` (2**20), `1G`, `100000`. Raises RecipeError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1].replace("_", "")) == 0:
        raise RecipeError(f"{text!r} is not a size; expected something like 512MB, 256MiB or 1.5GB")
    power = _POWERS.index(match[2].lower()) + 1 if match[2] else 0
    return max(1, round(float(match[1].replace("_", "")) * (1024 if match[3] else 1000) ** power))
