"""Compares two datasets: their manifests, and image by image, joined by key or by content.

Shards that both have (by sha256 and selection) are not read. The samples of all others are joined in a database on this
machine's disk, so that memory does not grow with the datasets.
"""

import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitscale.data.shards.manifest import Manifest, SelectExclude
from vitscale.data.shards.opening import local_copy
from vitscale.data.shards.provenance import provenance_path, read_provenance
from vitscale.ground.errors import DataError

EXAMPLES = 10

_FACTS = ("schema_version", "fields", "num_samples", "shuffle_seed", "num_rejected", "num_removed")

# Queries on the two tables a and b: name -> the FROM clause, and for each example its name and what A and B have.
_SHOW_CRC = "printf('crc32c %08x, %d bytes', {0}.crc, {0}.size)"
_QUESTIONS = {
    "only in A": ("a LEFT JOIN b USING (key) WHERE b.key IS NULL", "a.name", "a.labels", "''"),
    "only in B": ("b LEFT JOIN a USING (key) WHERE a.key IS NULL", "b.name", "''", "b.labels"),
    "another source image": (
        "a JOIN b USING (key) WHERE a.sha256 <> b.sha256",
        "a.name",
        "hex(a.sha256)",
        "hex(b.sha256)",
    ),
    "same source image, stored differently": (
        "a JOIN b USING (key) WHERE a.sha256 = b.sha256 AND (a.crc <> b.crc OR a.size <> b.size)",
        "a.name",
        _SHOW_CRC.format("a"),
        _SHOW_CRC.format("b"),
    ),
    "other labels": ("a JOIN b USING (key) WHERE a.labels <> b.labels", "a.name", "a.labels", "b.labels"),
}


@dataclass
class Difference:
    """The differences between datasets A and B; false if there are none.

    Attributes:
        facts: the manifests' differing facts: name -> its values in A and B.
        classes_added, classes_removed: class names that only B has, and that only A has, in their order.
        classes_reordered: whether the names that both have come in another order.
        counts: kind of difference -> the number of samples; no zeros.
        examples: kind of difference -> up to EXAMPLES of (key, what A has, what B has), sorted by key; the key is A's
            if both have one.
        equal_shards: the number of shards that both have.
        unequal_shards: the numbers of shards that only A has, and only B, by their sha256. They are no difference: the
            cuts between shards do not count.
    """

    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    classes_added: list[str] = field(default_factory=list)
    classes_removed: list[str] = field(default_factory=list)
    classes_reordered: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    equal_shards: int = 0
    unequal_shards: tuple[int, int] = (0, 0)

    def __bool__(self) -> bool:
        return bool(self.facts or self.classes_added or self.classes_removed or self.classes_reordered or self.counts)


def diff(a: Manifest, b: Manifest, by: Literal["key", "content"] = "key") -> Difference:
    """Compare two datasets; the samples' order, file names and the cuts between shards do not count.

    Samples are the same if their keys are equal, or, by "content", if the SHA-256 of their source images is; among
    equal images each is paired with one counterpart.

    Raises:
        DataError: a provenance table that is needed is missing or damaged.
        StorageError: a URL does not answer.
    """
    found = Difference()
    for name in _FACTS:
        values = getattr(a, name), getattr(b, name)
        if values[0] != values[1]:
            found.facts[name] = values
    for option in sorted(a.options.keys() | b.options.keys()):
        values = a.options.get(option), b.options.get(option)
        if values[0] != values[1]:
            found.facts[f"options.{option}"] = values
    in_a, in_b = set(a.class_names), set(b.class_names)
    found.classes_removed = [name for name in a.class_names if name not in in_b]
    found.classes_added = [name for name in b.class_names if name not in in_a]
    common_a, common_b = ([name for name in of.class_names if name in in_a and name in in_b] for of in (a, b))
    found.classes_reordered = common_a != common_b

    shards_a, shards_b = _different_shards(a, b)
    found.equal_shards, found.unequal_shards = len(a.shards) - len(shards_a), (len(shards_a), len(shards_b))
    if shards_a or shards_b:
        with tempfile.TemporaryDirectory(prefix="vitscale-") as folder:
            database = sqlite3.connect(Path(folder) / "samples.sqlite")
            try:
                for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -262144"):  # KiB
                    database.execute(f"PRAGMA {setting}")
                _fill(database, "a", a, shards_a, by)
                _fill(database, "b", b, shards_b, by)
                _ask(database, found)
            except sqlite3.OperationalError as error:
                raise DataError(f"{folder}: cannot hold the list of samples ({error}); set TMPDIR") from error
            finally:
                database.close()
    return found


def _different_shards(a: Manifest, b: Manifest) -> tuple[list[int], list[int]]:
    """For each dataset the indices of the shards that the other does not have with the same selection."""
    if a.class_names != b.class_names:  # equal labels may mean different classes
        return list(range(len(a.shards))), list(range(len(b.shards)))
    identities_a, identities_b = ([_identity(of, index) for index in range(len(of.shards))] for of in (a, b))
    common = Counter(identities_a) & Counter(identities_b)
    return _without(identities_a, common), _without(identities_b, common)


def _identity(manifest: Manifest, index: int) -> tuple[str, str]:
    shard = manifest.shards[index]
    if isinstance(shard.select, SelectExclude):
        return shard.sha256, shard.select.exclude.sha256
    return shard.sha256, str(shard.num_selected)


def _without(identities: list[tuple[str, str]], common: Counter[tuple[str, str]]) -> list[int]:
    left = common.copy()
    indices = []
    for index, identity in enumerate(identities):
        if left[identity]:
            left[identity] -= 1
        else:
            indices.append(index)
    return indices


def _fill(database: sqlite3.Connection, table: str, manifest: Manifest, indices: list[int], by: str) -> None:
    """Make a table of the samples in some shards of a dataset; `name` is a sample's key, `key` what it is joined by."""
    rows = f"{table}_rows"
    database.execute(f"CREATE TABLE {rows} (name TEXT, sha256 BLOB, crc INTEGER, size INTEGER, labels TEXT)")
    for index in indices:
        database.executemany(f"INSERT INTO {rows} VALUES (?, ?, ?, ?, ?)", _rows(manifest, index))
    key = "name"
    if by == "content":  # with a number among equal images, so that each is joined with one other
        key = "hex(sha256) || row_number() OVER (PARTITION BY sha256 ORDER BY labels, crc, size, name)"
    database.execute(f"CREATE TABLE {table} AS SELECT {key} AS key, * FROM {rows}")
    database.execute(f"DROP TABLE {rows}")
    try:
        database.execute(f"CREATE UNIQUE INDEX {table}_key ON {table} (key)")  # at the end: sorted once
    except sqlite3.IntegrityError as error:
        raise DataError(
            f"{manifest.where}: two samples have the same key, so samples cannot be compared by key"
        ) from error


def _rows(manifest: Manifest, index: int) -> Iterator[tuple[str, bytes, int, int, str]]:
    if manifest.shards[index].adopted is not None:
        raise DataError(
            f"{manifest.location(manifest.shards[index].path)}: differs, but is an adopted file, whose samples have no "
            f"keys to compare them by. vitscale-convert makes a dataset with keys of {manifest.where}"
        )
    slots = manifest.selected_slots(index)
    where = provenance_path(manifest.location(manifest.shards[index].path))
    with local_copy(where) as path:
        table = read_provenance(path, ["key", "sha256", "crc32c", "size", "labels"])
    if table.num_rows != manifest.shards[index].samples:
        raise DataError(f"{where}: {table.num_rows:,} rows; the shard has {manifest.shards[index].samples:,} samples")
    names = manifest.class_names

    @lru_cache(1 << 16)
    def named(labels: tuple[int, ...]) -> str:
        return json.dumps([names[label] if 0 <= label < len(names) else label for label in labels], ensure_ascii=False)

    columns = (table if slots is None else table.take(np.asarray(slots))).to_pydict()
    for key, sha256, crc, size, labels in zip(*columns.values(), strict=True):
        yield key, sha256, crc, size, named(tuple(labels))


def _ask(database: sqlite3.Connection, found: Difference) -> None:
    for what, (where, name, of_a, of_b) in _QUESTIONS.items():
        (count,) = database.execute(f"SELECT count(*) FROM {where}").fetchone()
        if count:
            found.counts[what] = count
            rows = database.execute(f"SELECT {name}, {of_a}, {of_b} FROM {where} ORDER BY 1 LIMIT {EXAMPLES}")
            found.examples[what] = rows.fetchall()
