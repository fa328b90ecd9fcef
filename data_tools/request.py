"""The request of a conversion: every option that decides what is written, and no other; and what it resolves to."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from data_tools.dedup.against import NamedIndex, open_matcher
from data_tools.dedup.matching import Matcher
from data_tools.listing import fingerprint
from data_tools.machine import Machine
from data_tools.output import Output
from data_tools.sources import Kind, Source, SourceOptions, open_source
from data_tools.splits import SplitRule
from vitscale.data.shards import DEFAULT_CAPACITY
from vitscale.data.shards.images import IMAGE_SUFFIXES, ImageOptions
from vitscale.ground import storage
from vitscale.ground.errors import RecipeError
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.table import Console


@dataclass(frozen=True)
class Request:
    """What a conversion is asked to write.

    Attributes:
        src: path, URL or pattern of the source.
        kind: kind of the source; None to detect it.
        source: where labels and images are found in the source, or that images get no label.
        classes: all classes in order; None for the classes found.
        shuffle_seed: seed of the global shuffle, in [0, 2**63).
        shard_samples: number of images per shard.
        shard_bytes: approximate bytes per shard, which overrides `shard_samples`; None to use that.
        images: how images are stored.
        splits: split rules; empty for a single dataset.
        limit: number of images to take, the first in shuffled order; None for all.
        dedup: indexes of test sets whose copies are left out.
        taken: which images of `src` are taken, in words, if the caller of `convert` hands over an open source;
            must differ wherever the images differ.
    """

    src: str
    kind: Kind | None = None
    source: SourceOptions = field(default_factory=SourceOptions)
    classes: tuple[str, ...] | None = None
    shuffle_seed: int = 0
    shard_samples: int = DEFAULT_CAPACITY
    shard_bytes: int | None = None
    images: ImageOptions = field(default_factory=ImageOptions)
    splits: tuple[SplitRule, ...] = ()
    limit: int | None = None
    dedup: tuple[NamedIndex, ...] = ()
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
        labels = self.source.labels and fingerprint(self.source.labels)
        asked = {"src": without_secrets(self.src), "kind": self.kind, "seed": self.shuffle_seed}
        if self.taken is not None:
            asked["taken"] = self.taken
        asked |= asdict(self.source) | {"state_of_labels": labels}
        return asked | {"labels": self.source.labels and without_secrets(self.source.labels)}

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
    """A request, resolved: what the stages of a conversion work with.

    Attributes:
        request: what is written.
        source: where it is read from.
        matcher: recognises copies of test images; None if none are left out. Workers open it by `request.dedup`.
        output: where it is written to.
        machine: how it is run.
        console: shows progress.
    """

    request: Request
    source: Source
    matcher: Matcher | None
    output: Output
    machine: Machine
    console: Console

    @classmethod
    def of(
        cls, request: Request, output: Output, machine: Machine, console: Console, source: Source | None = None
    ) -> "Conversion":
        """Open the source, unless it is given, and the indexes of test sets. Raises as `convert`."""
        if source is None:
            source = open_source(request.src, request.kind, request.source, has_splits=bool(request.splits))
        matcher = open_matcher(request.dedup) if request.dedup else None
        return cls(request, source, matcher, output, machine, console)


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
