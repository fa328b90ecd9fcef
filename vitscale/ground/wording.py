"""Numbers and lists in sentences (`2 shards`, `0-3, 7`, `a, b and 3 more`); JSON; pydantic's mistakes in our words."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SHOWN_SPANS = 10
_SHOWN_CHARACTERS = 500


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2 epochs`, `1,000 classes`: a number and its noun, given in the singular."""
    hisses = noun.endswith(("s", "ch", "sh", "x")) and not noun.endswith("och")
    plural = noun if number == 1 else f"{noun}es" if hisses else f"{noun}s"
    return f"{number:,} {plural}"


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no NaN: a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ranges(numbers: list[int]) -> str:
    """`0-3, 7, 9-12`: sorted numbers as spans, of which the first ten are shown."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in spans[:_SHOWN_SPANS])
    return shown + (" ..." if len(spans) > _SHOWN_SPANS else "")


def listed(words: Sequence[object], most: int = 8) -> str:
    """`a, b, c and 7 more`: the first `most` words, and how many more there are."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(map(str, words[:most])) + more


def quoted(values: Iterable[object], most: int, total: int | None = None) -> str:
    """`'a', 'b' ...`: the first few of some values as Python writes them; of `total`, if not all of them are given."""
    values = list(values)
    dots = " ..." if (len(values) if total is None else total) > min(len(values), most) else ""
    return ", ".join(map(repr, values[:most])) + dots


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'ViT-B/16'?`, the known word most like another; "" if none is like it."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def shortened(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """A text for a message, cut after `limit` characters: it may be a stranger's."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def describe_mistake(details: Any) -> str:
    """One entry of pydantic's `ValidationError.errors()`: `KEY: what is wrong`, without a key where all is wrong."""
    kind = details["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        what = "unknown key"
    elif kind in ("missing", "missing_argument"):
        what = "missing"
    elif kind == "value_error":
        what = str(details["ctx"]["error"])
    else:
        what = describe_expected(details)
    return ": ".join(filter(None, (".".join(map(str, details["loc"])), what)))


def decimals(value: float) -> str:
    """A metric with four decimals; a small one, such as a learning rate, with its exponent."""
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def describe_expected(details: Any) -> str:
    """What pydantic expected instead of a value, in words."""
    expected, message = _EXPECTED.get(details["type"]), details["msg"]
    if expected is not None:
        return f"expected {expected.format(**details.get('ctx', {}))}"
    if message.startswith("Input should be "):
        return f"expected {message.removeprefix('Input should be ')}"
    return f"{message[0].lower()}{message[1:]}"


# Pydantic's type of a mistake -> what was expected instead.
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt:.16g}",
    "greater_than_equal": "a number from {ge:.16g}",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "less_than": "a number below {lt:.16g}",
    "less_than_equal": "a number up to {le:.16g}",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_short": "some text",
    "string_type": "text",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
    "tuple_type": "a list",
}
