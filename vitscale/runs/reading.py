"""Reads JSON that another process may be writing: text cut short, or a value of another type, is None, not an error."""

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from vitscale.ground.storage import read_bytes

_MOST = 1e18
_YEAR_9999 = 253_370_764_800  # in seconds since 1970


def parse_object(text: bytes) -> dict[str, Any] | None:
    """`text` parsed as a JSON object; None if it is not one. NaN, which is no JSON, is read as null."""
    try:
        content = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is missing or holds none."""
    with suppress(OSError):
        return parse_object(read_bytes(path))
    return None


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < _MOST else None  # false for NaN, too


def count(value: Any) -> int | None:
    """`value` if it is a whole number from 0, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None


def text(value: Any) -> str:
    """`value` if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def timestamp(value: Any) -> float | None:
    """A time in ISO 8601 as seconds since 1970; None if `value` is no such time from then to 9998."""
    with suppress(ValueError, OverflowError):
        seconds = datetime.fromisoformat(text(value)).timestamp()
        return seconds if 0 <= seconds < _YEAR_9999 else None
    return None
