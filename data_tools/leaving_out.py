"""Writes a dataset without some of its samples: a view that refers to the same shards."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from data_tools.views import ViewWriter
from vitscale.data.shards import Manifest, ShardEntry
from vitscale.data.shards.opening import local_copy, open_shard
from vitscale.data.shards.provenance import provenance_path, read_provenance
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError

LIST_NAME = "left_out_uids.txt"
_OPTION = "without"  # the manifest option that lists what was left out


def write_without(manifest: Manifest, uids: np.ndarray, out: str, beside: Mapping[str, bytes]) -> Manifest:
    """Write a view of a dataset without some of its samples; its manifest gives their number and their list's digest.

    Args:
        manifest: the dataset.
        uids: uids to leave out, int64 (n,), sorted; all of them selected samples.
        out: a new or empty folder; in the dataset's bucket if that is at a URL.
        beside: contents of more files to write into `out`, by name.

    Raises:
        RecipeError: `out` cannot be used, or no sample would be left.
        DataError: a shard is missing or damaged, or the disk fails.
        StorageError: a URL does not answer.
    """
    if len(uids) >= manifest.num_samples:
        raise RecipeError(
            f"all {manifest.num_samples:,} samples of {manifest.where} are to be left out, so none would be left"
        )
    listed = "".join(f"{uid}\n" for uid in uids.tolist()).encode()
    told = {"samples": len(uids), "of": manifest.sha256, LIST_NAME: hashlib.sha256(listed).hexdigest()}
    content = {name: getattr(manifest, name) for name in Manifest.model_fields}
    try:
        with ViewWriter(manifest, out) as view:
            entries = tuple(entries_without(view, manifest, uids))
            for name, text in {LIST_NAME: listed, **beside}.items():
                view.add(name, text)
            return view.save(
                Manifest(
                    **content
                    | {
                        "num_samples": sum(entry.num_selected for entry in entries),
                        "options": manifest.options | {_OPTION: [*manifest.options.get(_OPTION, []), told]},
                        "shards": entries,
                    }
                )
            )
    except OSError as error:
        raise DataError(f"OUT {out}: cannot be written ({error.strerror or error})") from error


def uids_in_shard(manifest: Manifest, index: int, uids: np.ndarray) -> np.ndarray:
    """The subset of `uids`, int64 (n,) and sorted, that belongs to shard `index`."""
    shards = manifest.shards
    start = int(np.searchsorted(uids, shards[index].first_uid)) if index else 0
    end = int(np.searchsorted(uids, shards[index + 1].first_uid)) if index + 1 < len(shards) else None
    return uids[start:end]


def remaining_shards(manifest: Manifest, uids: np.ndarray) -> Iterator[int]:
    """Numbers of the shards that keep any sample without `uids`, which are sorted and all selected."""
    for index, entry in enumerate(manifest.shards):
        if entry.num_selected > len(uids_in_shard(manifest, index, uids)):
            yield index


def entries_without(view: ViewWriter, manifest: Manifest, uids: np.ndarray) -> list[ShardEntry]:
    """Entries of a view for what is left of a dataset's shards.

    Args:
        view: a view of `manifest`.
        manifest: the dataset.
        uids: uids to leave out, int64 (n,), sorted; all of them selected.

    Raises:
        OSError, StorageError: a list cannot be written, or a URL does not answer.
        DataError: a shard is missing or damaged.
    """
    entries = []
    for index in remaining_shards(manifest, uids):
        removed, kept = uids_in_shard(manifest, index, uids), None
        if len(removed):
            where = manifest.shards[index].path
            kept = _slots_without(manifest.slots(index), uids_of_slots(manifest, index), removed, where)
        entries.append(view.entry(index, kept))
    return entries


def _slots_without(slots: np.ndarray, uid_of: np.ndarray, uids: np.ndarray, where: str) -> np.ndarray:
    """The slots whose uid is not among `uids`.

    Args:
        slots: selected slots, int64 (n,).
        uid_of: uids of all slots, int64 (samples,).
        uids: uids to leave out.
        where: the shard's name in messages.

    Raises DataError if a uid belongs to none of the slots.
    """
    removed = np.isin(uid_of[slots], uids)
    if removed.sum() != len(uids):
        raise DataError(
            f"{where}: has {int(removed.sum()):,} of the {len(uids):,} uids that are to be removed from it. `vitscale "
            "shards verify` tells whether the dataset is damaged"
        )
    return slots[~removed]


def uids_of_slots(manifest: Manifest, index: int) -> np.ndarray:
    """Uids of all slots of a shard. At a URL, read from the small table beside the shard if there is one."""
    entry = manifest.shards[index]
    where = manifest.location(entry.path)
    beside = provenance_path(where)
    if not storage.is_url(where) or storage.size_of(beside) is None:
        with open_shard(manifest, index, with_keys=False) as shard:
            return shard.file.uid
    with local_copy(beside) as path:
        table = read_provenance(path, ["uid"])
    if table.num_rows != entry.samples:
        raise DataError(f"{beside}: {table.num_rows:,} rows; the manifest says {entry.samples:,} samples")
    return table["uid"].to_numpy()
