"""Writes views of a dataset: manifests that refer to its shards in place and leave out some of their samples.

A subset, such as the 9M, 30M and 90M images of the paper, is the first samples: conversion shuffles once, so they
are a random subset, and a larger subset contains every smaller one. The part of a divided dataset that a sample is in
depends on its uid, the seed and the shares, not on the sharding.
"""

import io
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from data_tools.output import staged
from vitscale.data.shards import MANIFEST_NAME, ExcludedSlots, Manifest, SelectExclude, SelectFirst, ShardEntry
from vitscale.data.shards.manifest import StoredChecksums, schema_version_of
from vitscale.data.shards.opening import open_shard, table_beside
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError, StorageError, os_errors
from vitscale.ground.files.durable import durable_file, remove_leftovers
from vitscale.recipe.shares import by_largest_remainder

LEFT_OUT_NAME = "left_out_uids.txt"
_WITHOUT = "without"  # the manifest option that lists what was left out
_PART = re.compile(r"(?:([A-Za-z0-9][\w.-]*)=)?(\d+(?:\.\d+)?)", re.ASCII)

_Record = TypeVar("_Record", ShardEntry, ExcludedSlots, StoredChecksums)

Kept = Iterable[tuple[int, np.ndarray | None]]
"""(a shard's number, the selected slots to keep, int64 (n,), sorted; None for all), for the shards that keep any."""


def write_view(
    whole: Manifest, out: str, kept: Kept, beside: Mapping[str, bytes] = MappingProxyType({}), **changes: Any
) -> Manifest:
    """Write a view of some samples of a dataset.

    Args:
        whole: the dataset.
        out: a new or empty folder; in the dataset's bucket if that is at a URL.
        kept: the samples.
        beside: contents of more files to write into `out`, by name.
        changes: fields of the manifest that differ from the dataset's; those of the samples and shards are known.

    Raises:
        RecipeError: `out` cannot be used, or has no relative path to the shards.
        DataError: a shard is missing or damaged, or the disk fails.
        StorageError: a URL does not answer.
    """
    with _View(whole, out) as view:
        return view.write(kept, beside, **changes)


def write_subset(dataset: str, out: str, count: int) -> Manifest:
    """Write a view of a dataset's first `count` samples. Raises as `write_view`, and RecipeError for too many."""
    whole = Manifest.load(dataset)
    if not 1 <= count <= whole.num_samples:
        raise RecipeError(f"a subset of {count:,} samples: {dataset} has {whole.num_samples:,}")

    def first() -> Kept:
        left = count
        for index, entry in enumerate(whole.shards):
            if left == 0:
                return
            yield index, whole.slots(index)[:left] if entry.num_selected > left else None
            left -= min(left, entry.num_selected)

    return write_view(whole, out, first())


class Part(NamedTuple):
    """A requested part: the name of its folder, and its share (in any unit: only the ratio counts)."""

    name: str
    share: float


def parse_parts(text: str, dataset: str) -> tuple[Part, ...]:
    """Parses `98,2` or `train98=98,dev=2`; by default `<dataset's folder>-<share>`. Raises RecipeError."""
    folder = storage.base_name(_folder(dataset))
    parts = []
    for each in text.split(","):
        match = _PART.fullmatch(each.strip())
        if match is None or float(match[2]) == 0:
            raise RecipeError(f"--parts {text}: {each!r}: expected a share above 0, as in 98,2 or train=98,dev=2")
        parts.append(Part(match[1] or f"{folder}-{match[2]}", float(match[2])))
    names = [part.name for part in parts]
    if len(parts) < 2 or len(set(names)) < len(names):
        raise RecipeError(f"--parts {text}: expected at least two parts with different names, as in a=50,b=50")
    return tuple(parts)


def write_parts(dataset: str, out: str, parts: Sequence[Part], seed: int = 0) -> list[Manifest]:
    """Write a view for each part of a dataset; every sample is in exactly one part.

    The parts' sizes follow their shares, rounded by largest remainder.

    Args:
        dataset: the dataset's folder, manifest file or URL; its shards are opened, because only they hold the uids.
        out: the folder that gets one folder per part, each new or empty; in the dataset's bucket if that is at a URL.
        parts: at least one part.
        seed: seed of the division.

    Raises as `write_view`, and RecipeError for a part that would be empty.
    """
    whole = Manifest.load(dataset)
    total = sum(part.share for part in parts)
    counts = by_largest_remainder(whole.num_samples, [part.share / total for part in parts])
    if 0 in counts:
        empty = parts[counts.index(0)]
        raise RecipeError(
            f"part {empty.name!r} would be empty: {empty.share:g} of {total:g} of the {whole.num_samples:,} samples of "
            f"{dataset}"
        )
    with ExitStack() as stack:
        views = [stack.enter_context(_View(whole, storage.join(out, part.name))) for part in parts]
        part_of = _divided(whole, counts, seed)
        written = []
        for number, view in enumerate(views):
            kept = ((index, slots[of == number]) for index, (slots, of) in enumerate(part_of))
            written.append(view.write((index, slots) for index, slots in kept if len(slots)))
        return written


def place_of_parts(dataset: str) -> str:
    """The default `out` of `write_parts`: the dataset's parent folder. Raises DataError and StorageError."""
    return posixpath.dirname(_folder(dataset))


def _folder(dataset: str) -> str:
    where = Manifest.load(dataset).where
    return posixpath.dirname(where if storage.is_url(where) else str(Path(where).absolute()))


def _divided(whole: Manifest, counts: Sequence[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each shard, its selected slots, sorted, and the number of each one's part: two (slots,) arrays."""
    slots, hashes = [], []
    for index in range(len(whole.shards)):
        with open_shard(whole, index, with_keys=False) as shard:
            uids = shard.file.uid[shard.slots].astype("<u8").tobytes()
            of_uids = (xxhash.xxh3_64_intdigest(uids[at : at + 8], seed) for at in range(0, len(uids), 8))
            slots.append(shard.slots)
            hashes.append(np.fromiter(of_uids, np.uint64, len(shard.slots)))
    part_of = np.empty(whole.num_samples, np.uint8 if len(counts) < 256 else np.int64)
    part_of[np.argsort(np.concatenate(hashes), kind="stable")] = np.repeat(np.arange(len(counts)), counts)
    borders = np.cumsum([len(each) for each in slots])[:-1]
    return list(zip(slots, np.split(part_of, borders), strict=True))


def write_without(manifest: Manifest, uids: np.ndarray, out: str, beside: Mapping[str, bytes]) -> Manifest:
    """Write a view of a dataset without some of its samples; its manifest gives their number and their list's digest.

    `uids` are to be left out, int64 (n,), sorted; all of them selected samples. Raises as `write_view`, and RecipeError
    if no sample would be left.
    """
    if len(uids) >= manifest.num_samples:
        raise RecipeError(
            f"all {manifest.num_samples:,} samples of {manifest.where} are to be left out, so none would be left"
        )
    listed = "".join(f"{uid}\n" for uid in uids.tolist()).encode()
    told = {"samples": len(uids), "of": manifest.sha256, LEFT_OUT_NAME: sha256(listed).hexdigest()}
    options = manifest.options | {_WITHOUT: [*manifest.options.get(_WITHOUT, []), told]}
    return write_view(manifest, out, kept_without(manifest, uids), {LEFT_OUT_NAME: listed, **beside}, options=options)


def kept_without(manifest: Manifest, uids: np.ndarray) -> Iterator[tuple[int, np.ndarray | None]]:
    """What is left of a dataset without `uids`, int64 (n,), sorted; all of them selected samples.

    Raises DataError for a shard that is missing or damaged, StorageError for a URL that does not answer.
    """
    for index, (entry, removed) in enumerate(zip(manifest.shards, uids_by_shard(manifest, uids), strict=True)):
        if entry.num_selected > len(removed):
            yield index, _slots_without(manifest, index, removed) if len(removed) else None


def uids_by_shard(manifest: Manifest, uids: np.ndarray) -> list[np.ndarray]:
    """`uids`, int64 (n,), sorted, divided by the shards that they belong to."""
    return np.split(uids, np.searchsorted(uids, [entry.first_uid for entry in manifest.shards[1:]]))


def _slots_without(manifest: Manifest, index: int, uids: np.ndarray) -> np.ndarray:
    """A shard's selected slots whose uid is not among `uids`. Raises DataError if one of these is in none of them."""
    slots = manifest.slots(index)
    removed = np.isin(_uids_of_slots(manifest, index)[slots], uids)
    if removed.sum() != len(uids):
        raise DataError(
            f"{manifest.shards[index].path}: has {int(removed.sum()):,} of the {len(uids):,} uids that are to be "
            "removed from it. `vitscale shards verify` tells whether the dataset is damaged"
        )
    return slots[~removed]


def _uids_of_slots(manifest: Manifest, index: int) -> np.ndarray:
    """Uids of all slots of a shard. At a URL, read from the small table beside the shard if there is one."""
    is_remote = storage.is_url(manifest.location(manifest.shards[index].path))
    table = table_beside(manifest, index, ["uid"]) if is_remote else None
    if table is not None:
        return table["uid"].to_numpy()
    with open_shard(manifest, index, with_keys=False) as shard:
        return shard.file.uid


class _View:
    """Writes one view, into a folder or to a URL in the dataset's bucket.

    Files are written as they are added, and removed if the `with` block ends with an error.
    """

    def __init__(self, dataset: Manifest, out: str) -> None:
        """Raises RecipeError if `out` cannot be used, or has no relative path to the shards."""
        if not storage.is_url(out) and os.path.lexists(out) and not Path(out).is_dir():
            raise RecipeError(f"OUT {out}: is not a folder. Choose a new or empty folder")
        with os_errors(f"OUT {out}: cannot be read", RecipeError):
            remove_leftovers(Path(out))
            names = storage.names_in(out)
        if names:
            raise RecipeError(f"OUT {out}: not empty ({', '.join(names[:5])}). Choose a new or empty folder")
        self._dataset, self._out = dataset, out
        self._added: list[str] = []
        if not storage.is_url(out) and not storage.is_url(dataset.where):
            self._here = os.path.realpath(out)
            return
        place = _bucket(dataset.where) or str(dataset.directory.parent)
        if _bucket(dataset.where) != _bucket(out):
            raise RecipeError(
                f"OUT {out}: a view of {dataset.where} refers to its shards where they are; choose a folder in {place}"
            )
        self._here = out.rstrip("/")

    def __enter__(self) -> "_View":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for name in self._added:
                with suppress(OSError, StorageError):
                    storage.remove(storage.join(self._out, name))

    def write(self, kept: Kept, beside: Mapping[str, bytes] = MappingProxyType({}), **changes: Any) -> Manifest:
        """Write all files, the manifest last. As `write_view`."""
        with os_errors(f"OUT {self._out}: cannot be written"):
            shards = tuple(self._entry(index, slots) for index, slots in kept)
            for name, content in beside.items():
                self._add(name, content)
            same = {name: getattr(self._dataset, name) for name in Manifest.model_fields}
            same |= {"schema_version": schema_version_of(shards), "shards": shards}
            same["num_samples"] = sum(each.num_selected for each in shards)
            self._added.append(MANIFEST_NAME)
            with staged([storage.join(self._out, MANIFEST_NAME)]) as (path,):
                saved = Manifest(**same | changes).save(path.parent)
            return Manifest.load(self._out) if storage.is_url(self._out) else saved

    def _entry(self, index: int, kept: np.ndarray | None) -> ShardEntry:
        entry = self._moved(self._dataset.shards[index])
        changes: dict[str, Any] = {}
        if entry.adopted is not None:
            changes["adopted"] = entry.adopted.model_copy(update={"checksums": self._moved(entry.adopted.checksums)})
        if kept is not None and len(kept) < entry.num_selected:
            changes["select"] = self._selection(index, entry, kept)
        elif isinstance(entry.select, SelectExclude):
            changes["select"] = SelectExclude(exclude=self._moved(entry.select.exclude))
        return entry.model_copy(update=changes)

    def _moved(self, record: _Record) -> _Record:
        """The dataset's record of a file, with a path relative to the view."""
        return record.model_copy(update={"path": self._relative(record.path)})

    def _add(self, name: str, content: bytes) -> None:
        self._added.append(name)
        with staged([storage.join(self._out, name)]) as (path,), durable_file(path) as file:
            file.write(content)

    def _selection(self, index: int, entry: ShardEntry, kept: np.ndarray) -> SelectFirst | SelectExclude:
        if len(kept) == 0 or kept[-1] == len(kept) - 1:
            return SelectFirst(first=len(kept))
        excluded = np.setdiff1d(np.arange(entry.samples), kept).astype(np.uint32)
        file = io.BytesIO()
        np.save(file, excluded)
        content = file.getvalue()
        name = f"shard-{index:05d}.excluded.npy"  # by number: shards in different folders may have the same name
        self._add(name, content)
        return SelectExclude(exclude=ExcludedSlots(path=name, sha256=sha256(content).hexdigest(), count=len(excluded)))

    def _relative(self, path: str) -> str:
        there = self._dataset.location(path)
        if storage.is_url(there):
            return posixpath.relpath(there.partition("://")[2], self._here.partition("://")[2])
        # The system resolves links before `..`, so the folder is resolved here; not the file, which has companions.
        folder, name = os.path.split(there)
        return Path(os.path.relpath(os.path.realpath(folder), self._here), name).as_posix()


def _bucket(url: str) -> str | None:
    """`s3://bucket` of a URL; None for a path."""
    if not storage.is_url(url):
        return None
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{rest.split('/')[0]}"
