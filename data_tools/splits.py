"""Split rules: which images of a source go into which dataset.

    --split val=10000        10,000 images, the first in shuffled order
    --split val=2%           about 2 % of the images; the same ones if other images are added
    --split test=@keys.txt   the images whose keys a file lists, one per line
    --split train=a*/b?/*    the images whose keys match a pattern
    --split train=rest       all other images

Rules apply in order: an image goes to the first split that takes it.
"""

import fnmatch
import hashlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from data_tools.classes import read_lines
from data_tools.listing import order_hash
from vitscale.ground.errors import RecipeError

_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_OTHER_SEED = 1 << 63
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")

Takes = Callable[[str], object]  # true if the next image in order, given by its key, belongs to a split


class Chooser(NamedTuple):
    """A rule in use; asked in order about every image that no earlier rule took."""

    takes: Takes
    expected: int | None = None  # number of images that it must have taken in the end, if the rule gives one


@dataclass(frozen=True)
class SplitRule:
    """One `--split NAME=WHAT`."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}={self.what}"

    def described(self) -> str:
        """The rule as it decides the content: for a list, its keys and not its path. Raises RecipeError."""
        if not self.what.startswith("@"):
            return self.what
        keys = _listed(self)
        digest = hashlib.sha256("\0".join(sorted(keys)).encode()).hexdigest()
        return f"list of {len(keys)} keys, sha256 {digest}"


def parse_splits(texts: list[str]) -> tuple[SplitRule, ...]:
    """Parses rules from the command line. Raises RecipeError."""
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
        raise RecipeError(f"--split: a name is repeated in {', '.join(names)}")
    whole = next((rule for rule in rules[:-1] if rule.what == "rest"), None)
    if whole is not None:
        raise RecipeError(f"--split {whole}: takes all that is left, so it must be the last")
    choosers(tuple(rules), 0)  # finds a missing file now rather than after hours of listing
    return tuple(rules)


def choosers(rules: tuple[SplitRule, ...], seed: int) -> list[Chooser]:
    """Choosers for the rules; `seed` is the shuffle's. Raises RecipeError."""
    made: list[Chooser] = []
    start = 0.0  # where the next share starts
    for rule in rules:
        share = _SHARE.fullmatch(rule.what)
        if share is not None:
            end = start + float(share[1]) / 100
            if start >= end or end > 1 + 1e-9:
                raise RecipeError(f"--split {rule}: expected more than 0%, and at most 100% over all splits")
            made.append(Chooser(_share(start, end, seed)))
            start = end
        elif rule.what.isdecimal():
            if int(rule.what) == 0:
                raise RecipeError(f"--split {rule}: expected at least one image")
            made.append(Chooser(_first(int(rule.what)), int(rule.what)))
        elif rule.what.startswith("@"):
            keys = _listed(rule)
            made.append(Chooser(keys.__contains__, len(keys)))
        elif rule.what == "rest":
            made.append(Chooser(lambda key: True))
        else:
            made.append(Chooser(re.compile(fnmatch.translate(rule.what)).fullmatch))
    return made


def _share(start: float, end: float, seed: int) -> Takes:
    first, last = round(start * 2**64), round(end * 2**64)
    # Not the shuffle's hash: a share must be spread evenly over the shuffled order.
    return lambda key: first <= order_hash(key, seed ^ _OTHER_SEED) < last


def _first(count: int) -> Takes:
    numbers = itertools.count()
    return lambda key: next(numbers) < count


def _listed(rule: SplitRule) -> frozenset[str]:
    return frozenset(read_lines(rule.what[1:], f"--split {rule}", "a file with one key per line"))
