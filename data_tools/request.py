"""The request of a conversion: every option that decides what is written, and no other; and what it resolves to.

Split rules say which images go into which dataset, in order: an image goes to the first split that takes it.

    --split val=10000        10,000 images, the first in shuffled order
    --split val=2%           about 2 % of the images; the same ones if other images are added
    --split test=@keys.txt   the images whose keys a file lists, one per line
    --split train=a*/b?/*    the images whose keys match a pattern
    --split train=rest       all other images
"""

import fnmatch
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.classes import read_lines
from data_tools.dedup.against import NamedIndex, open_matcher
from data_tools.dedup.matching import Matcher
from data_tools.listing import Spool, fingerprint, order_hash
from data_tools.machine import Machine
from data_tools.output import SPLIT_NAME, Output
from data_tools.sources import Kind, Source, SourceOptions, open_source
from vitscale.data.shards import DEFAULT_CAPACITY
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.table import Console

_COUNT = re.compile(r"([0-9][0-9_]{0,20}(?:\.[0-9]{1,9})?)([kmb]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
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
        if not equals or not what or not re.fullmatch(SPLIT_NAME, name):
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
            if len(rule.what) > 18 or int(rule.what) == 0:
                raise RecipeError(f"--split {rule}: expected at least one image, and fewer than 10^18")
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


@dataclass(frozen=True)
class Request:
    """What a conversion is asked to write."""

    src: str  # path, URL or pattern of the source
    kind: Kind | None = None  # kind of the source; None to detect it
    source: SourceOptions = field(default_factory=SourceOptions)  # where labels and images are found in it
    classes: tuple[str, ...] | None = None  # all classes in order; None for the classes found
    shuffle_seed: int = 0  # seed of the global shuffle, in [0, 2**63)
    shard_samples: int = DEFAULT_CAPACITY  # number of images per shard
    images: ImageOptions = field(default_factory=ImageOptions)  # how images are stored
    splits: tuple[SplitRule, ...] = ()  # split rules; empty for a single dataset
    limit: int | None = None  # number of images to take, the first in shuffled order; None for all
    dedup: tuple[NamedIndex, ...] = ()  # indexes of test sets whose copies are left out
    # Which images of `src` are taken, in words, if the caller of `convert` hands over an open source; must differ
    # wherever the images differ.
    taken: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "src", storage.without_file_scheme(self.src))
        labels = self.source.labels
        if labels is not None and not storage.is_url(labels):
            object.__setattr__(self, "source", replace(self.source, labels=os.path.abspath(labels)))  # noqa: PTH100
        if not storage.is_url(self.src):
            object.__setattr__(self, "src", os.path.abspath(self.src))  # noqa: PTH100 -- patterns are no Path

    @property
    def split_names(self) -> list[str]:
        """Names of the datasets; a single empty name if there are no splits."""
        return [rule.name for rule in self.splits] or [""]

    def to_json(self) -> dict[str, Any]:
        """The request as flat, plain values without unset options, to compare with another call's."""
        flat: dict[str, Any] = {}
        for name, value in asdict(replace(self, dedup=())).items():
            flat |= value if isinstance(value, dict) else {name: value}
        flat["dedup_against"] = [index.title for index in self.dedup]
        flat |= {name: without_secrets(flat[name]) for name in ("src", "labels") if flat.get(name)}
        flat["splits"] = [f"{rule.name}={rule.described()}" for rule in self.splits]
        if self.classes is not None:
            digest = hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()
            flat["classes"] = f"{len(self.classes)} names of sha256 {digest[:16]}"
        return {name: value for name, value in flat.items() if value not in (None, [], ())}

    def listed(self) -> dict[str, Any]:
        """The options that the list of images and the order within a spool depend on, as plain values."""
        labels = self.source.labels
        options: dict[str, Any] = {"src": without_secrets(self.src), "kind": self.kind, "seed": self.shuffle_seed}
        if self.taken is not None:
            options["taken"] = self.taken
        options |= asdict(self.source) | {"state_of_labels": labels and fingerprint(labels)}
        return options | {"labels": labels and without_secrets(labels)}

    def manifest_options(self, split: str) -> dict[str, Any]:
        """The options that change the dataset's content, for its manifest."""
        options: dict[str, Any] = {"image_suffixes": list(IMAGE_SUFFIXES), "shard_samples": self.shard_samples}
        options |= self.images.described()
        if self.limit is not None:
            options["limit"] = self.limit
        if self.taken is not None:
            options["taken"] = self.taken
        if self.source.unlabelled:
            options["unlabelled"] = True
        if self.dedup:
            options["dedup_against"] = [index.described() for index in self.dedup]
        for rule in self.splits:
            if rule.name == split:
                options["split"] = rule.described()
        return options


@dataclass(frozen=True)
class Conversion:
    """A request, resolved: what the stages of a conversion work with."""

    request: Request  # what is written
    source: Source  # where it is read from
    matcher: Matcher | None  # recognises copies of test images; workers open it by `request.dedup`
    output: Output  # where it is written to
    machine: Machine  # how it is run
    console: Console  # shows progress

    @classmethod
    def of(
        cls, request: Request, output: Output, machine: Machine, console: Console, source: Source | None = None
    ) -> "Conversion":
        """Open the source, unless it is given, and the indexes of test sets. Raises as `convert`."""
        if source is None:
            source = open_source(request.src, request.kind, request.source, has_splits=bool(request.splits))
        matcher = open_matcher(request.dedup) if request.dedup else None
        return cls(request, source, matcher, output, machine, console)

    @property
    def listing(self) -> Path:
        """The folder of the lists of images."""
        return self.output.work / "listing"

    @property
    def reader(self) -> Source | Spool:
        """What listed images are read from."""
        return Spool(self.listing) if self.source.streams else self.source


def refuse_changed(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raise RecipeError, listing the differences, if the unfinished conversion in `where` had another request."""
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if names:
        lines = [f"  {name}: {_short(before.get(name))} before, {_short(now.get(name))} now" for name in names]
        raise RecipeError(
            f"OUT {where}: holds an unfinished conversion with other options. Repeat the command as it was, or remove "
            "the folder to start anew\n" + "\n".join(lines)
        )


def _short(value: Any) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def parse_count(text: str) -> int:
    """`9M` -> 9,000,000; also `30k`, `1.5M`, `1B`, `1_000`. Raises RecipeError unless it is a whole number above 0."""
    match = _COUNT.fullmatch(text.strip())
    number = Decimal(match[1].replace("_", "")) * _UNITS[match[2].lower()] if match else Decimal(0)
    if number < 1 or number != int(number):
        raise RecipeError(f"{text!r} is not a number of images: expected a whole number from 1, such as 9M, 30k, 1_000")
    return int(number)
