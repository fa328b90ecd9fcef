"""Reads a dataset shard by shard, wherever it is; from a URL, one shard at a time is copied to a temporary folder."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vitscale.data.shards.beton import NO_LABEL, ShardFile
from vitscale.data.shards.foreign import ForeignShard
from vitscale.data.shards.manifest import Manifest
from vitscale.ground.errors import DataError
from vitscale.ground.images import OK, crc32c, decode
from vitscale.ground.storage import base_name, get, is_url, size_of
from vitscale.ground.wording import counted


@dataclass(frozen=True)
class OpenShard:
    """One shard of a dataset, open."""

    index: int  # in the manifest
    file: ShardFile
    slots: np.ndarray  # those that belong to the dataset, sorted, int64 (n,)
    keys: list[str] | None  # the source's names of the images of all slots; None without a table of provenance

    def name(self, slot: int) -> str:
        """A sample's name in messages: its uid, and its key if known."""
        uid = f"uid {int(self.file.uid[slot])}"
        return uid if self.keys is None else f"{uid} ({self.keys[slot]})"

    def image(self, slot: int) -> bytes:
        """The stored image of a slot, compared with its checksum. Raises DataError if it is damaged."""
        content = self.file.read(slot)
        if crc32c(content) != int(self.file.crc[slot]):
            raise DataError(
                f"{self.file.path}: {self.name(slot)} is damaged; `vitscale shards verify` finds all damage"
            )
        return content

    def pixels(self, slot: int) -> np.ndarray:
        """The picture of a slot, uint8 (height, width, 3). Raises DataError if it is damaged."""
        content, height, width = self.image(slot), int(self.file.height[slot]), int(self.file.width[slot])
        if self.file.raw[slot]:
            return np.frombuffer(content, np.uint8).reshape(height, width, 3)
        status, pixels = decode(content, height, width)
        if status != OK:
            raise DataError(f"{self.file.path}: {self.name(slot)} does not decode cleanly")
        return pixels

    def image_file(self, slot: int) -> tuple[bytes, str]:
        """A slot's image file and its suffix: the JPEG, or a PNG of raw pixels. Raises DataError if it is damaged."""
        content = self.image(slot)
        if self.file.raw[slot]:
            return raw_to_png(content, int(self.file.height[slot]), int(self.file.width[slot])), ".png"
        return content, ".jpg"

    def labels(self, slot: int) -> list[int]:
        """All labels of a slot, the main one first. Raises DataError if they are damaged."""
        return labels_of(self.file, slot)


def raw_to_png(content: bytes, height: int, width: int) -> bytes:
    """A PNG of raw pixels: height x width x 3 bytes, RGB."""
    from PIL import Image  # only files of FFCV's own writer need it

    png = io.BytesIO()
    Image.fromarray(np.frombuffer(content, np.uint8).reshape(height, width, 3)).save(png, "PNG")
    return png.getvalue()


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
    """A manifest, read once per process, as a large one has megabytes. Raises DataError if `sha256` is not its own."""
    manifest = Manifest.load(where)
    if manifest.sha256 != sha256:
        raise DataError(f"{where}: has changed since the command began. Repeat it")
    return manifest


def shard_file(manifest: Manifest, index: int, path: Path, expected_bytes: int | None = None) -> ShardFile:
    """Open shard `index` of a dataset, whose file is at `path`; it must have `expected_bytes`, or any size if None.

    An adopted shard's checksums are beside the manifest. Raises DataError if the file or they are missing or damaged,
    StorageError if a URL does not answer.
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
    """As `shard_file`; also raises DataError unless size, number of samples and first uid are the manifest's."""
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
    """Open one shard of a dataset, with its samples' keys if these are wanted and known. A context manager.

    Raises DataError if anything of it is missing, damaged, or not what the manifest says, StorageError if a URL does
    not answer.
    """
    keys = keys_of(manifest, index) if with_keys else None
    entry, slots = manifest.shards[index], manifest.slots(index)
    with local_copy(manifest.location(entry.path), entry.bytes) as path, open_shard_file(manifest, index, path) as file:
        yield OpenShard(index, file, slots, keys)


def keys_of(manifest: Manifest, index: int) -> list[str] | None:
    """The source's names of the images in all slots of a shard, if they are known. Raises as `table_beside` does."""
    table = table_beside(manifest, index, ["key"])
    return None if table is None else table["key"].to_pylist()


def table_beside(manifest: Manifest, index: int, columns: list[str]) -> Any:
    """Columns of the table of provenance beside a shard, a `pyarrow.Table`; None if there is none.

    Raises DataError if it is damaged or has other than one row a sample, StorageError if a URL does not answer.
    """
    from vitscale.data.shards.provenance import provenance_path, read_provenance  # loads pyarrow

    entry = manifest.shards[index]
    beside = provenance_path(manifest.location(entry.path))
    if size_of(beside) is None:
        return None
    with local_copy(beside) as path:
        table = read_provenance(path, columns)
    if table.num_rows != entry.samples:
        raise DataError(f"{beside}: {table.num_rows:,} rows; the manifest says {entry.samples:,} samples")
    return table


def named_slots(manifest: Manifest) -> Iterator[tuple[OpenShard, int, str]]:
    """(open shard, slot, the image's name in the source) of every sample of a dataset.

    Raises `DataError` if a shard has no provenance table, and otherwise as `open_shard` does.
    """
    for index in range(len(manifest.shards)):
        with open_shard(manifest, index) as shard:
            if shard.keys is None:
                raise DataError(f"{shard.file.path}: no table of provenance beside it, so images have no names")
            yield from ((shard, slot, shard.keys[slot]) for slot in shard.slots.tolist())


def sample_names(manifest: Manifest) -> Iterator[tuple[int, str]]:
    """(uid, the image's name in the source) of every sample of a dataset. Raises as `named_slots`."""
    return ((int(shard.file.uid[slot]), name) for shard, slot, name in named_slots(manifest))


def names_by_uid(manifest: Manifest) -> dict[int, str]:
    """The images' names in the source, by uid; empty if a shard has no table of provenance. Raises as `open_shard`."""
    if any(keys_of(manifest, index) is None for index in range(len(manifest.shards))):
        return {}
    return dict(sample_names(manifest))


@contextmanager
def local_copy(where: str, most: int | None = None) -> Iterator[Path]:
    """The path itself if it is on this machine; for a URL, the path of a temporary copy. A context manager.

    Raises DataError if the URL's file is missing, forbidden, over `most` bytes or too large for the disk, StorageError
    if it does not answer.
    """
    if not is_url(where):
        yield Path(where)
        return
    with tempfile.TemporaryDirectory(prefix="vitscale-") as folder:
        path = Path(folder) / base_name(where)
        try:
            get(where, path, most)
        except FileNotFoundError as error:
            raise DataError(f"{where}: missing") from error
        except OSError as error:
            raise DataError(f"{where}: cannot be read ({error.strerror or type(error).__name__})") from error
        yield path
