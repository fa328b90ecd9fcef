"""Reads a dataset shard by shard, wherever it is: from a URL one shard at a time comes into a temporary folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from vitscale.errors import DataError
from vitscale.images import crc32c
from vitscale.shards.beton import NO_LABEL, ShardFile
from vitscale.shards.foreign import ForeignShard
from vitscale.shards.manifest import Manifest
from vitscale.shards.provenance import provenance_path, read_provenance
from vitscale.storage import base_name, get, is_url, size_of
from vitscale.wording import counted


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
        if crc32c(content) != int(self.file.crc[slot]):
            raise DataError(
                f"{self.file.path}: {self.name(slot)} is damaged; `vitscale shards verify` finds all that is"
            )
        return content

    def image_file(self, slot: int) -> tuple[bytes, str]:
        """The image of a slot as an image file, and its suffix: the stored JPEG, or a PNG of raw pixels.

        Raises DataError if it is damaged.
        """
        content = self.image(slot)
        if not self.file.raw[slot]:
            return content, ".jpg"
        from vitscale.shards.raw import raw_to_png  # loads Pillow, for files of FFCV's own writer alone

        return raw_to_png(content, int(self.file.height[slot]), int(self.file.width[slot])), ".png"

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


def shard_file(manifest: Manifest, index: int, path: Path, expected_bytes: int | None = None) -> ShardFile:
    """A shard of a dataset, open: one of ours, or an adopted one, whose checksums lie beside the manifest.

    Args:
        manifest: of the dataset.
        index: of the shard in the manifest.
        path: where its file lies on this machine.
        expected_bytes: that it must have.

    Raises:
        DataError: the file or its checksums are missing or damaged.
        StorageError: a URL that does not answer.
    """
    adopted = manifest.shards[index].adopted
    if adopted is None:
        return ShardFile(path, expected_bytes)
    return ForeignShard(
        path,
        image_field=adopted.image_field,
        label_field=adopted.label_field,
        crc=manifest.checksums(index),
        expected_bytes=expected_bytes,
    )


def open_shard_file(manifest: Manifest, index: int, path: Path) -> ShardFile:
    """As `shard_file`, and of the size, the number of samples and the first uid that the manifest says."""
    entry = manifest.shards[index]
    file = shard_file(manifest, index, path, entry.bytes)
    found = file.samples, int(file.uid[0])
    if found != (entry.samples, entry.first_uid):
        file.close()
        raise DataError(
            f"{path}: {counted(found[0], 'sample')} from uid {found[1]}; the manifest says {entry.samples} from "
            f"{entry.first_uid}: this is another shard"
        )
    return file


@contextmanager
def open_shard(manifest: Manifest, index: int, with_keys: bool = True) -> Iterator[OpenShard]:
    """One shard of a dataset, with the keys of its samples if wanted and there.

    Raises:
        DataError: anything of it missing, damaged, or other than the manifest says.
        StorageError: a URL that does not answer.
    """
    entry = manifest.shards[index]
    where = manifest.location(entry.path)
    slots = manifest.slots(index)
    keys = None
    if with_keys and size_of(provenance_path(where)) is not None:
        with local_copy(provenance_path(where)) as path:
            keys = read_provenance(path, ["key"])["key"].to_pylist()
    with local_copy(where) as path, open_shard_file(manifest, index, path) as file:
        if keys is not None and len(keys) != file.samples:
            raise DataError(f"{where}: {file.samples:,} samples; its table of provenance has {len(keys):,}")
        yield OpenShard(index, file, slots, keys)


def sample_names(manifest: Manifest) -> Iterator[tuple[int, str]]:
    """(uid, what the image was called in the source) of every sample of a dataset.

    Raises `DataError` where no table of provenance tells, and as `open_shard` does.
    """
    for index in range(len(manifest.shards)):
        with open_shard(manifest, index) as shard:
            if shard.keys is None:
                raise DataError(f"{shard.file.path}: no table of provenance beside it, hence no names of images")
            yield from zip(
                shard.file.uid[shard.slots].tolist(), [shard.keys[slot] for slot in shard.slots], strict=True
            )


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
