"""Splits: which images of a source go into which data set.

    --split val=10000        so many, the first of the shuffled order
    --split val=2%           about that share, from the end of the shuffled order; the same images when others are added
    --split test=@keys.txt   the images whose keys a file lists, one a line
    --split train=a*/b?/*    the images whose keys match a pattern
    --split train=rest       what is left

Rules are asked in order; an image goes to the first that takes it.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_tools.listing import order_hash
from vitscale.errors import RecipeError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")

Takes = Callable[[str], bool]  # whether the image of a key, the next one in order, belongs to a split


@dataclass(frozen=True)
class SplitRule:
    """One `--split NAME=WHAT`."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}={self.what}"


def parse_splits(texts: list[str]) -> tuple[SplitRule, ...]:
    """Rules from the command line. Raises RecipeError."""
    rules = []
    for text in texts:
        name, equals, what = text.partition("=")
        if not equals or not what or not _NAME.fullmatch(name):
            raise RecipeError(
                f"--split {text}: expected NAME=WHAT, such as val=2%, val=10000, test=@keys.txt, 'train=a*/b?/*' or "
                "train=rest"
            )
        rules.append(SplitRule(name, what))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise RecipeError(f"--split: a name twice among {', '.join(names)}")
    choosers(tuple(rules), 0)  # a file that is missing is better found now than after hours of listing
    return tuple(rules)


def choosers(rules: tuple[SplitRule, ...], seed: int) -> list[Takes]:
    """The rules at work, each to be asked about the images that those before it have not taken. Raises RecipeError."""
    made: list[Takes] = []
    end = 1.0  # shares are taken from here down
    for rule in rules:
        share = _SHARE.fullmatch(rule.what)
        if share is not None:
            start = end - float(share[1]) / 100
            if start >= end or start < -1e-9:
                raise RecipeError(f"--split {rule}: expected more than 0%, and at most 100% over all splits")
            made.append(_share(start, end, seed))
            end = start
        elif rule.what.isdecimal():
            made.append(_first(int(rule.what)))
        elif rule.what.startswith("@"):
            made.append(_listed(rule))
        elif rule.what == "rest":
            made.append(lambda key: True)
        else:
            made.append(_matching(re.compile(fnmatch.translate(rule.what))))
    return made


def _share(start: float, end: float, seed: int) -> Takes:
    first, last = round(max(start, 0.0) * 2**64), round(end * 2**64)
    return lambda key: first <= order_hash(key, seed) < last


def _first(count: int) -> Takes:
    left = count

    def takes(key: str) -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    return takes


def _matching(pattern: re.Pattern[str]) -> Takes:
    return lambda key: pattern.fullmatch(key) is not None


def _listed(rule: SplitRule) -> Takes:
    try:
        keys = frozenset(Path(rule.what[1:]).read_text("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise RecipeError(f"--split {rule}: {reason}. Expected a file of one key a line") from error
    return lambda key: key in keys
