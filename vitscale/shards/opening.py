"""A dataset read shard by shard, wherever it is: of a URL, one shard at a time comes into a temporary folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from vitscale.errors import DataError
from vitscale.shards.beton import NO_LABEL, ShardFile
from vitscale.shards.checksums import crc32c_of
from vitscale.shards.manifest import Manifest
from vitscale.shards.provenance import provenance_path, read_provenance
from vitscale.storage import base_name, get, is_url, size_of


@dataclass(frozen=True)
class OpenShard:
    """One shard of a dataset, open.

    Attributes:
        index: of the shard in the manifest.
        file: the shard.
        slots: the slots that belong to the dataset, sorted, int64 (n,).
        keys: what the images of all slots were called in the source; None if no table of provenance is there.
    """

    index: int
    file: ShardFile
    slots: np.ndarray
    keys: list[str] | None

    def name(self, slot: int) -> str:
        """What people call a sample."""
        uid = f"uid {int(self.file.uid[slot])}"
        return uid if self.keys is None else f"{uid} ({self.keys[slot]})"

    def image(self, slot: int) -> bytes:
        """The stored image of a slot, checked. Raises DataError if it is damaged."""
        content = self.file.read(slot)
        if crc32c_of(content) != int(self.file.crc[slot]):
            raise DataError(
                f"{self.file.path}: {self.name(slot)} is damaged; `vitscale shards verify` finds all that is"
            )
        return content

    def labels(self, slot: int) -> list[int]:
        """All labels of a slot, the main one first. Raises DataError if they are damaged."""
        return labels_of(self.file, slot)


def labels_of(file: ShardFile, slot: int) -> list[int]:
    """All labels of a slot, the main one first; empty for none. Raises DataError if they are damaged."""
    several = file.labels(slot)
    main = int(file.label[slot])
    labels = [label for label in [main] if label != NO_LABEL] if several is None else several.tolist()
    if min(labels, default=0) < 0 or labels[:1] != ([] if main == NO_LABEL else [main]):
        raise DataError(
            f"{file.path}: uid {int(file.uid[slot])} is damaged: its main label is {main}, all are {labels}"
        )
    return labels


@lru_cache(maxsize=1)
def known_manifest(where: str, sha256: str) -> Manifest:
    """A manifest, read once a process: that of a large dataset has megabytes. Raises DataError if it has changed."""
    manifest = Manifest.load(where)
    if manifest.sha256 != sha256:
        raise DataError(f"{where}: has changed since the command began. Repeat it")
    return manifest


@contextmanager
def open_shard(manifest: Manifest, index: int, with_keys: bool = True) -> Iterator[OpenShard]:
    """One shard of a dataset, with the keys of its samples if wanted and there.

    Raises:
        DataError: anything of it missing, of another size or number of samples than the manifest says, or damaged.
        StorageError: a URL that does not answer.
    """
    entry = manifest.shards[index]
    where = manifest.location(entry.path)
    slots = manifest.selected_slots(index)
    keys = None
    if with_keys and size_of(provenance_path(where)) is not None:
        with local_copy(provenance_path(where)) as path:
            keys = read_provenance(path, ["key"])["key"].to_pylist()
    with local_copy(where) as path, ShardFile(path, entry.bytes) as file:
        if file.samples != entry.samples or (keys is not None and len(keys) != file.samples):
            rows = "" if keys is None else f", its table of provenance {len(keys):,}"
            raise DataError(f"{where}: {file.samples:,} samples; the manifest says {entry.samples:,}{rows}")
        yield OpenShard(index, file, np.arange(file.samples) if slots is None else slots, keys)


@contextmanager
def local_copy(where: str) -> Iterator[Path]:
    """A file as it lies on this machine, or a copy of what is at a URL, gone afterwards.

    Raises:
        DataError: nothing is there, or it may not be read.
        StorageError: a URL that does not answer.
    """
    if not is_url(where):
        yield Path(where)
        return
    with tempfile.TemporaryDirectory(prefix="vitscale-") as folder:
        path = Path(folder) / base_name(where)
        try:
            get(where, path)
        except FileNotFoundError as error:
            raise DataError(f"{where}: missing") from error
        except OSError as error:
            raise DataError(f"{where}: cannot be read ({error.strerror or type(error).__name__})") from error
        yield path
