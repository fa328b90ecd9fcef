"""Divides a dataset into parts, such as train and development splits: writes manifests, copies nothing.

A sample's part depends on its uid, the seed and the shares, not on the sharding.
"""

import posixpath
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from data_tools.views import ViewWriter
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import open_shard
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.storage import base_name, is_url, join
from vitscale.recipe.shares import by_largest_remainder

_PART = re.compile(r"(?:([A-Za-z0-9][\w.-]*)=)?(\d+(?:\.\d+)?)", re.ASCII)


class Part(NamedTuple):
    """A requested part: the name of its folder, and its share (in any unit: only the ratio counts)."""

    name: str
    share: float


def parse_parts(text: str, dataset: str) -> tuple[Part, ...]:
    """Parses parts such as `98,2` or `train98=98,dev=2`; the default name is `<dataset's folder>-<share>`.

    Raises RecipeError.
    """
    folder = base_name(_folder(dataset))
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
    """Write a manifest for each part of a dataset; every sample is in exactly one part.

    The parts' sizes follow their shares, rounded by largest remainder.

    Args:
        dataset: the dataset's folder, manifest file or URL; its shards are opened, because only they hold the uids.
        out: the folder that gets one folder per part, each new or empty; in the dataset's bucket if that is at a URL.
        parts: at least one part.
        seed: seed of the division.

    Raises:
        RecipeError: a part would be empty, or a part's folder cannot be used.
        DataError: the dataset is missing or damaged.
        StorageError: a URL does not answer.
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
        views = [stack.enter_context(ViewWriter(whole, join(out, part.name))) for part in parts]
        part_of = _divided(whole, counts, seed)
        try:
            return [_write(whole, view, number, part_of) for number, view in enumerate(views)]
        except OSError as error:
            raise DataError(f"OUT {out}: cannot be written ({error.strerror or error})") from error


def place_of_parts(dataset: str) -> str:
    """The default `out` of `write_parts`: the dataset's parent folder. Raises DataError and StorageError."""
    return posixpath.dirname(_folder(dataset))


def _folder(dataset: str) -> str:
    where = Manifest.load(dataset).where
    return posixpath.dirname(where if is_url(where) else str(Path(where).absolute()))


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


def _write(whole: Manifest, view: ViewWriter, number: int, part_of: list[tuple[np.ndarray, np.ndarray]]) -> Manifest:
    kept = [slots[parts == number] for slots, parts in part_of]
    shards = tuple(view.entry(index, slots) for index, slots in enumerate(kept) if len(slots))
    content = {name: getattr(whole, name) for name in Manifest.model_fields}
    return view.save(Manifest(**content | {"num_samples": sum(map(len, kept)), "shards": shards}))
