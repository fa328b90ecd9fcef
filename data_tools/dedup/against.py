"""Compares images with indexes of test sets while they are converted, some dozens at a time.

An index is identified once, by its path and digest, and opened once in every process that compares with it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from data_tools.dedup.closest import Closest
from data_tools.dedup.decisions import decisions
from data_tools.dedup.embedding import Embedder
from data_tools.dedup.fingerprint import Fingerprint, fingerprint
from data_tools.dedup.index import FingerprintIndex
from data_tools.dedup.luma import Window
from data_tools.dedup.matching import Matcher, Query
from data_tools.dedup.pictures import small_picture
from data_tools.dedup.settings import Settings
from data_tools.dedup.tally import Tally
from vitscale.data.shards.images import StoredImage
from vitscale.data.shards.provenance import DECISIONS
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.images import decode

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
    """Raise RecipeError for an index whose vectors were made by another model."""
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
def open_matcher(indexes: tuple[NamedIndex, ...], settings: tuple[tuple[str, Settings], ...] = ()) -> Matcher:
    """The matcher for the test sets of these indexes; one per process.

    `settings`, by test set name, replace the index's.

    Raises DataError: an index that is missing, or that has changed since it was named.
    """
    opened = []
    for named in indexes:
        index = FingerprintIndex(named.path)
        if index.sha256 != named.sha256:
            raise DataError(
                f"{named.path}: the index has changed since the command was started. Put back that of "
                f"{', '.join(named.test_sets)}, or remove the output and start anew"
            )
        opened.append(index)
    return Matcher(opened, dict(settings), next((one.embedder for one in indexes if one.embedder is not None), None))


class Named(Query, Protocol):
    """An image that may be a copy, with its uid and key."""

    @property
    def uid(self) -> int: ...
    @property
    def key(self) -> str: ...

    def picture(self) -> bytes:
        """A small JPEG of it."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A converted image that may be a copy: a `matching.Query`.

    Attributes:
        uid, key: those of the sample that it will become.
        jpeg, height, width: as in `images.StoredImage`.
        sha256: digest of the source's bytes.
        fingerprint: fingerprint of its pixels.
    """

    uid: int
    key: str
    jpeg: bytes
    height: int
    width: int
    sha256: bytes
    fingerprint: Fingerprint

    @classmethod
    def of(cls, stored: StoredImage, content: bytes, uid: int = 0, key: str = "") -> "Candidate":
        """The candidate for `content`, an image file's bytes, and the image stored for it."""
        digest, found = sha256(content).digest(), fingerprint(stored.pixels)
        return cls(uid, key, stored.jpeg, stored.height, stored.width, digest, found)

    @property
    def pixels(self) -> int:
        return self.fingerprint.pixels

    @property
    def quality(self) -> int:
        return self.fingerprint.quality

    @property
    def pdq(self) -> bytes:
        return self.fingerprint.pdq

    @property
    def pdq_trimmed(self) -> bytes | None:
        return self.fingerprint.pdq_trimmed

    def luma(self, trimmed: bool) -> np.ndarray:
        """uint8 (64, 64)."""
        luma = self.fingerprint.luma_trimmed if trimmed else self.fingerprint.luma
        assert luma is not None
        return luma

    @property
    def inside(self) -> Window | None:
        return self.fingerprint.inside

    def rgb(self) -> np.ndarray:
        """The picture as stored, uint8 (height, width, 3); decoded again, because few need it."""
        return decode(self.jpeg, self.height, self.width)[1]

    def picture(self) -> bytes:
        """A small JPEG of it."""
        return small_picture(self.rgb())


_Image = TypeVar("_Image", bound=Named)
_Held = TypeVar("_Held", bound=Candidate)


@dataclass
class Findings:
    """The counts and closest pairs of a comparison; those of several tasks add up."""

    tally: Tally
    closest: Closest

    @classmethod
    def none(cls, matcher: Matcher) -> "Findings":
        return cls(Tally.empty([test_set.name for test_set in matcher.test_sets]), Closest())

    def add(self, other: "Findings") -> None:
        self.tally.add(other.tally)
        self.closest.merge(other.closest)

    def to_json(self) -> dict[str, Any]:
        return {"tally": self.tally.to_json(), "closest": self.closest.to_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Findings":
        return cls(Tally.from_json(content["tally"]), Closest.from_json(content["closest"]))


class Comparison:
    """Compares the images of one task with indexes.

    Attributes:
        findings: the findings so far.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.findings = Findings.none(self._matcher)
        self._matcher.tally = self.findings.tally
        self._decisions: list[pa.Table] = []

    def kept(self, images: Iterable[_Held]) -> Iterator[_Held]:
        """The images that are not copies, in order; some dozens are held at a time."""
        held: list[_Held] = []
        for image in images:
            held.append(image)
            if len(held) == _IMAGES_AT_ONCE or sum(len(one.jpeg) for one in held) >= _BYTES_AT_ONCE:
                yield from self.compare(held)
                held = []
        if held:
            yield from self.compare(held)

    def decisions(self) -> pa.Table:
        """The decisions, of schema `decisions.DECISIONS`, in the order of the images."""
        return pa.concat_tables([DECISIONS.empty_table(), *self._decisions]).combine_chunks()

    def compare(self, images: list[_Image]) -> list[_Image]:
        """Those of `images` that are not copies."""
        matches = self._matcher.match(images)
        if any(matches):
            self._decisions.append(decisions(self._matcher, [(one.uid, one.key) for one in images], matches))
        for image, of_image in zip(images, matches, strict=True):
            self.findings.closest.add(image.key, of_image, image.picture)
        return [
            image
            for image, of_image in zip(images, matches, strict=True)
            if not any(match.removed for match in of_image)
        ]
