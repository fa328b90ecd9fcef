"""The request of a conversion: every option that decides what is written, and no other; and what it resolves to."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from data_tools.conversion_plan import SplitRule
from data_tools.dedup.against import NamedIndex, open_matcher
from data_tools.dedup.matching import Matcher
from data_tools.listing import Spool, fingerprint
from data_tools.machine import Machine
from data_tools.output import Output
from data_tools.sources import Kind, Source, SourceOptions, open_source
from vitscale.data.shards import DEFAULT_CAPACITY
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.table import Console

_BYTES = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = "kmgt"
_COUNT = re.compile(r"([0-9][0-9_]{0,20}(?:\.[0-9]{1,9})?)([kmb]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Request:
    """What a conversion is asked to write."""

    src: str  # path, URL or pattern of the source
    kind: Kind | None = None  # kind of the source; None to detect it
    source: SourceOptions = field(default_factory=SourceOptions)  # where labels and images are found in it
    classes: tuple[str, ...] | None = None  # all classes in order; None for the classes found
    shuffle_seed: int = 0  # seed of the global shuffle, in [0, 2**63)
    shard_samples: int = DEFAULT_CAPACITY  # number of images per shard
    shard_bytes: int | None = None  # approximate bytes per shard, which overrides `shard_samples`; None to use that
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

    def manifest_options(self, split: str, shard_samples: int) -> dict[str, Any]:
        """The options that change the dataset's content, for its manifest."""
        options: dict[str, Any] = {"image_suffixes": list(IMAGE_SUFFIXES), "shard_samples": shard_samples}
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


# ------------------------------------------------------------------------- counts and sizes as people write them


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
