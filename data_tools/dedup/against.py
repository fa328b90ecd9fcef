"""Compares images with indexes of test sets while they are converted, some dozens at a time.

An index is identified once, by its path and digest, and opened once in every process that compares with it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from data_tools.dedup.embedding import Embedder
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.matches import Findings, Match
from data_tools.dedup.matching import Matcher
from data_tools.dedup.queries import Candidate, Query
from data_tools.dedup.variants import variant_name
from vitscale.data.shards.provenance import DECISIONS
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError

# Limits on the images held until they are compared.
_IMAGES_AT_ONCE = 64
_BYTES_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class NamedIndex:
    """An index's path, digest and test sets, as they were when the command named it. Sent to every worker.

    It carries the model that its vectors were made with, if it has vectors; the model is not part of its identity.
    """

    path: str
    sha256: str
    test_sets: tuple[str, ...]
    embedder: Embedder | None = None

    @property
    def title(self) -> str:
        """Identifies the index, wherever it is stored."""
        return f"sha256 {self.sha256[:16]} of {', '.join(self.test_sets)}"

    def described(self) -> dict[str, Any]:
        """The index's entry in a dataset's manifest."""
        return {"test_sets": list(self.test_sets), "sha256": self.sha256}

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, **self.described()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "NamedIndex":
        return cls(content["path"], content["sha256"], tuple(content["test_sets"]))


def name_indexes(
    paths: Sequence[str], what: str = "--dedup-against", embedder: Embedder | None = None
) -> tuple[NamedIndex, ...]:
    """Open and verify the indexes in some folders; `what` is the command line's name for them.

    Raises:
        RecipeError: a URL; a test set that is in two of them; vectors without the model that made them, another model
            than that, or a model that none of them needs.
        DataError: an index that is missing, damaged or of another version.
    """
    named = []
    for path in map(storage.without_file_scheme, paths):
        if storage.is_url(path):
            raise RecipeError(
                f"{what} {path}: an index is read at random places throughout. Copy it to a folder of this "
                "machine, or one that all machines share"
            )
        index = FingerprintIndex(os.path.abspath(path))  # noqa: PTH100 -- without following links: other machines may have others
        index.verify()
        _refuse_other_model(index, embedder, f"{what} {path}")
        names, own = tuple(one.name for one in index.test_sets), None if index.embedding is None else embedder
        named.append(NamedIndex(str(index.folder), index.sha256, names, own))
    if embedder is not None and not any(index.embedder for index in named):
        raise RecipeError("--embedding: no index has vectors; those of `vitscale dedup index --embedding` have")
    open_matcher(tuple(named))
    return tuple(named)


def _refuse_other_model(index: FingerprintIndex, embedder: Embedder | None, what: str) -> None:
    made_by = index.embedding
    if made_by is None:
        return
    if embedder is None:
        raise RecipeError(f"{what}: was made with the model {made_by.title}: give it, --embedding RUN|WEIGHTS")
    if made_by.sha256 != embedder.sha256:
        raise RecipeError(
            f"{what}: was made with the model {made_by.title} of sha256 {made_by.sha256[:16]}, and --embedding is "
            f"{embedder.title} of {embedder.sha256[:16]}: other weights, or another size or crop of pictures. Give the "
            "model that the index was made with, or make the index again"
        )


@lru_cache(maxsize=1)
def open_matcher(indexes: tuple[NamedIndex, ...]) -> Matcher:
    """The indexes' matcher, one per process. Raises DataError: an index is missing, or not as it was when named."""
    opened = []
    for named in indexes:
        index = FingerprintIndex(named.path)
        if index.sha256 != named.sha256:
            raise DataError(
                f"{named.path}: the index has changed since the command was started. Put back that of "
                f"{', '.join(named.test_sets)}, or remove the output and start anew"
            )
        opened.append(index)
    return Matcher(opened, next((one.embedder for one in indexes if one.embedder is not None), None))


class Comparison:
    """Compares the images of one task with test sets; `findings` are those so far."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.findings = matcher.findings = Findings(matcher.names)
        self._decisions: list[pa.Table] = []

    def kept(self, images: Iterable[Candidate]) -> Iterator[Candidate]:
        """The images that are not copies, in order; some dozens are held at a time."""
        held: list[Candidate] = []
        for image in images:
            held.append(image)
            if len(held) == _IMAGES_AT_ONCE or sum(len(one.jpeg) for one in held) >= _BYTES_AT_ONCE:
                yield from self._without_copies(held)
                held = []
        yield from self._without_copies(held)

    def decisions(self) -> pa.Table:
        """The matches of all images, in their order, as rows of `dedup.parquet`: of schema DECISIONS."""
        return pa.concat_tables([DECISIONS.empty_table(), *self._decisions]).combine_chunks()

    def compare(self, images: Sequence[Query]) -> list[bool]:
        """Whether each image is to be removed."""
        matches = self._matcher.match(images)
        rows = [self._row(image, match) for image, found in zip(images, matches, strict=True) for match in found]
        if rows:
            self._decisions.append(pa.Table.from_pylist(rows, DECISIONS))
        return [any(match.removed for match in found) for found in matches]

    def _without_copies(self, held: list[Candidate]) -> Iterator[Candidate]:
        return (image for image, removed in zip(held, self.compare(held), strict=True) if not removed)

    def _row(self, image: Query, match: Match) -> dict[str, Any]:
        return {
            "train_uid": image.uid,
            "train_key": image.key,
            "test_set": self._matcher.names[match.test_set],
            "test_key": match.key,
            "tier": match.tier,
            "distance": match.distance,
            "correlation": match.correlation,
            "cosine": match.cosine,
            "variant": None if match.variant is None else variant_name(match.variant),
            "removed": match.removed,
        }
