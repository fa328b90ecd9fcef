"""A dataset: `manifest.json`, which lists its shards and which of their samples belong to it.

A subset or a de-duplicated view is another manifest over the same shards (`select`), not a copy. A manifest does not
say when, where or how fast it was made, so equal inputs give equal bytes.

`checksum`, the second line, is the SHA-256 of all other lines, and the identity of the dataset. A manifest without it,
of an earlier version or edited by a person, is read as well.
"""

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from vitscale.ground.errors import DataError, os_errors, turned
from vitscale.ground.files.arrays import parse_array
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.durable import write_text
from vitscale.ground.safe_text import without_secrets
from vitscale.ground.storage import base_name, is_url, join, read_bytes
from vitscale.ground.wording import describe_mistake

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSIONS = (1, 2)  # 2: with adopted shards

_LISTED_MISTAKES = 5
_NO_VERSION = "not a manifest: no schema_version"
_EDITED = "damaged or edited: does not match its own checksum. Restore it; after an edit, remove the line `checksum`"

_CHECKSUM = re.compile(rb'\A\{\n  "checksum": "([0-9a-f]{64})",\n')


def _relative(path: str) -> str:
    if not path or path.startswith("/") or any(char < " " for char in path):
        raise ValueError(f"path {path!r} is not relative to the manifest")
    return path


_Path = Annotated[str, AfterValidator(_relative)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Content of a JSON file: no other keys, no conversions of types, no changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SelectFirst(Strict):
    """The first `first` slots of a shard."""

    first: _Count


class ExcludedSlots(Strict):
    """A .npy file of `count` sorted uint32 slots; `path` is relative to the manifest's directory."""

    path: _Path
    sha256: Sha256
    count: _Count


class SelectExclude(Strict):
    """All slots of a shard except those listed in a file."""

    exclude: ExcludedSlots


class StoredChecksums(Strict):
    """A .npy file with the crc32c of every image, uint32 (samples,); `path` is relative to the manifest's directory."""

    path: _Path
    sha256: Sha256


class Adopted(Strict):
    """Marks a shard as a file of FFCV's own writer: the fields that are used, and the checksums that it lacks.

    A `label_field` of None means that there are no labels.
    """

    image_field: str
    label_field: str | None
    checksums: StoredChecksums


class ShardEntry(Strict):
    """One shard: its path (relative to the manifest, possibly outside its directory), its content and its selection."""

    path: _Path
    samples: Annotated[int, Field(ge=1, le=2**32)]
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    sha256: Sha256
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    first_uid: _Count
    select: Literal["all"] | SelectFirst | SelectExclude = "all"
    adopted: Adopted | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `adopted` if it is None: manifests of version 1 do not have it."""
        content: dict[str, Any] = serialize(self)
        if self.adopted is None:
            del content["adopted"]
        return content

    @model_validator(mode="after")
    def _possible(self) -> "ShardEntry":
        if not 0 <= self.num_selected <= self.samples:
            raise ValueError(f"select {self.select} does not fit {self.samples} samples")
        return self

    @classmethod
    def of_file(cls, path: Path, *, samples: int, first_uid: int) -> "ShardEntry":
        """The entry of a shard beside its manifest, with digests computed from the file. Raises OSError."""
        return cls(path=path.name, samples=samples, first_uid=first_uid, **file_digests(path)._asdict())

    @property
    def num_selected(self) -> int:
        """The number of samples of this shard that belong to the dataset."""
        match self.select:
            case SelectFirst(first=first):
                return first
            case SelectExclude(exclude=excluded):
                return self.samples - excluded.count
        return self.samples


class Manifest(Strict):
    """A dataset: its shards, in order of uid, and which of their samples belong to it."""

    schema_version: Literal[1, 2] = 1  # as `schema_version_of`; a version 2 that would only need 1 is read as well
    fields: tuple[str, ...]  # of the shards, in order
    num_samples: _Count  # selected in all shards
    class_names: tuple[str, ...]  # by label; empty for a dataset without labels
    shuffle_seed: int  # of the conversion's global shuffle
    options: dict[str, Any] = Field(default_factory=dict)  # the conversion's settings that change its content
    num_rejected: _Count = 0  # images of the source that could not be decoded
    num_removed: _Count = 0  # samples that were removed later (near-duplicates of a test set)
    shards: tuple[ShardEntry, ...]

    _where: str | None = PrivateAttr(default=None)
    _sha256: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        selected = sum(shard.num_selected for shard in self.shards)
        if selected != self.num_samples:
            raise ValueError(
                f"num_samples is {self.num_samples}, but the shards' selected samples sum up to {selected}"
            )
        if self.schema_version < schema_version_of(self.shards):
            raise ValueError(f"adopted shards in a manifest of version {self.schema_version}; they belong to version 2")
        for what, values in (("shard paths", [s.path for s in self.shards]), ("class names", list(self.class_names))):
            repeated = sorted(value for value, times in Counter(values).items() if times > 1)
            if repeated:
                raise ValueError(f"{what} appear twice: {', '.join(repeated[:5])}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Read a dataset's manifest, given its directory or the file itself, on this machine or at a URL.

        Raises DataError if it is missing, unreadable, not JSON, of another schema version, or contradicts itself;
        RecipeError for a URL of an unknown kind, StorageError for one that does not answer.
        """
        where = str(path)
        if is_url(where):
            is_folder, file = False, where if base_name(where).endswith(".json") else join(where, MANIFEST_NAME)
        else:
            is_folder = Path(where).is_dir()
            file = join(where, MANIFEST_NAME) if is_folder else where
        try:
            content = read_bytes(file)
        except FileNotFoundError as error:
            looked = "no dataset there (no manifest.json)" if is_folder else "no such file or directory"
            below = sorted(path.parent.name for path in Path(where).glob(f"*/{MANIFEST_NAME}")) if is_folder else []
            what = f"name a dataset in it: {', '.join(below)}" if below else "a dataset is what vitscale-convert writes"
            raise DataError(f"{where}: {looked}; {what}") from error
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error})") from error
        stated, content = _CHECKSUM.match(content), _CHECKSUM.sub(b"{\n", content)
        sha256 = hashlib.sha256(content).hexdigest()
        if stated is not None and stated[1].decode() != sha256:
            raise DataError(f"{file}: {_EDITED}")
        try:
            manifest = cls.model_validate_json(content)
        except ValidationError as error:
            raise DataError(f"{file}: {_what_is_wrong(content, error)}") from error
        if "schema_version" not in manifest.model_fields_set:
            raise DataError(f"{file}: {_NO_VERSION}")
        manifest._where = file
        manifest._sha256 = sha256
        return manifest

    def save(self, directory: str | Path) -> "Manifest":
        """Write `manifest.json` into a directory, complete or not at all, and load it. Raises OSError."""
        file = Path(directory) / MANIFEST_NAME
        content = self._content()
        checksum = hashlib.sha256(content).hexdigest()
        write_text(file, content.decode().replace("{", f'{{\n  "checksum": "{checksum}",', 1))
        return Manifest.load(file)

    @property
    def where(self) -> str:
        """Path or URL of the manifest file. Raises ValueError for a manifest that was neither loaded nor saved."""
        if self._where is None:
            raise ValueError("this manifest is not on disk yet: save it first")
        return self._where

    @property
    def path(self) -> Path:
        """The manifest file's path. Raises ValueError unless it is on this machine."""
        if is_url(self.where):
            raise ValueError(f"{self.where} is not on this machine")
        return Path(self.where)

    @property
    def directory(self) -> Path:
        """The manifest file's directory. Raises ValueError unless it is on this machine."""
        return self.path.parent

    @property
    def sha256(self) -> str:
        """SHA-256 of the manifest file's bytes without the line of its `checksum`: the identity of the dataset."""
        return self._sha256 or hashlib.sha256(self._content()).hexdigest()

    def location(self, path: str) -> str:
        """Path or URL of a file relative to the manifest. Raises DataError if it leaves a URL's bucket or host."""
        if not is_url(self.where):
            return str(self.directory / path)
        scheme, _, file = self.where.partition("://")
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
        host = file.split("/")[0]  # or bucket
        if inside.split("/")[0] != host:
            raise DataError(f"{self.where}: {path} leads out of {scheme}://{host}")
        return f"{scheme}://{inside}"

    def shard_path(self, index: int) -> Path:
        """The path of shard `index` of `shards`. Raises ValueError unless the dataset is on this machine."""
        return self.directory / self.shards[index].path

    def selected_slots(self, index: int) -> np.ndarray | None:
        """Slots of shard `index` that belong to the dataset, sorted, int64 (num_selected,); None for all of them.

        Raises DataError if the list of excluded slots is missing, damaged or impossible.
        """
        shard = self.shards[index]
        match shard.select:
            case SelectFirst(first=first) if first < shard.samples:
                return np.arange(first, dtype=np.int64)
            case SelectExclude(exclude=excluded):
                return np.delete(np.arange(shard.samples, dtype=np.int64), self._read_excluded(excluded, shard))
        return None

    def slots(self, index: int) -> np.ndarray:
        """As `selected_slots`, but always an array: all slots of the shard in place of None."""
        selected = self.selected_slots(index)
        return np.arange(self.shards[index].samples, dtype=np.int64) if selected is None else selected

    def checksums(self, index: int) -> np.ndarray | None:
        """CRC-32C of the stored images of an adopted shard, uint32 (samples,); None for a shard that has its own.

        Raises DataError if they are missing, damaged or impossible, StorageError if a URL does not answer.
        """
        shard = self.shards[index]
        if shard.adopted is None:
            return None
        what = f"the checksums of {shard.path}"
        return self._read_numbers(shard.adopted.checksums, shard.samples, what, f"{shard.samples} uint32 checksums")

    def _read_excluded(self, excluded: ExcludedSlots, shard: ShardEntry) -> np.ndarray:
        what = f"the slots to leave out of {shard.path}"
        expected = f"{excluded.count} sorted uint32 slots below {shard.samples}"
        slots = self._read_numbers(excluded, excluded.count, what, expected)
        if not (np.all(slots[1:] > slots[:-1]) and np.all(slots < shard.samples)):
            raise DataError(f"{self.location(excluded.path)}: expected {expected}")
        return slots.astype(np.int64)

    def _read_numbers(
        self, listed: ExcludedSlots | StoredChecksums, count: int, what: str, expected: str
    ) -> np.ndarray:
        """The content of a .npy file that the manifest lists, uint32 (count,). Raises DataError."""
        file = self.location(listed.path)
        with os_errors(f"{file}: {what} cannot be read"):
            content = read_bytes(file)
        found = hashlib.sha256(content).hexdigest()
        if found != listed.sha256:
            raise DataError(f"{file}: damaged: sha256 {found}; the manifest says {listed.sha256}")
        with turned(f"{file}: not a .npy file", DataError, ValueError):
            numbers = parse_array(content)
        if numbers.dtype != np.uint32 or numbers.shape != (count,):
            raise DataError(f"{file}: expected {expected}")
        return numbers

    def _content(self) -> bytes:
        # ASCII with escapes: the bytes must not depend on a locale.
        content = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
        return without_secrets(content).encode("ascii")  # before its checksum is computed, not in `write_text`


def schema_version_of(shards: Iterable[ShardEntry]) -> Literal[1, 2]:
    """The schema version that a manifest of these shards needs: 2 if any of them is adopted."""
    return 2 if any(shard.adopted is not None for shard in shards) else 1


def _what_is_wrong(content: bytes, error: ValidationError) -> str:
    """Why this is not a manifest that we can read. Parses it a second time, so only call it after an error."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as problem:
        return f"not a manifest: {problem}"
    if not isinstance(data, dict) or "schema_version" not in data:
        return _NO_VERSION
    if data["schema_version"] not in SCHEMA_VERSIONS:
        known = " and ".join(map(str, SCHEMA_VERSIONS))
        return f"schema_version {data['schema_version']!r}; this version of vitscale reads {known}"
    if "checksum" in data:
        return _EDITED
    problems = [describe_mistake(problem) for problem in error.errors(include_url=False)[:_LISTED_MISTAKES]]
    more = error.error_count() - len(problems)
    return f"not a valid manifest: {'; '.join(problems)}" + (f"; and {more} more" if more else "")
