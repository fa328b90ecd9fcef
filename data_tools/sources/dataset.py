"""Another dataset of vitscale as a source: its selected samples, under the keys that it gave them."""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_tools.sources.fields import refuse_fields
from data_tools.sources.source import Item, SourceOptions
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import OpenShard, known_manifest, open_shard, raw_to_png
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.digests import file_digests
from vitscale.ground.images import crc32c
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted

_PLACE = struct.Struct("<QQI")  # position in the shard, size, crc32c
_RAW_PLACE = struct.Struct("<QQIHH")  # the same, height, width: for raw pixels in an adopted shard


@dataclass(frozen=True)
class DatasetSource:
    """The dataset of a manifest, one part per shard. Content is an image's place in its shard, and its checksum.

    Raw pixels of an adopted shard are returned as a PNG.

    Attributes:
        manifest: the manifest's path or URL; not the manifest itself, which may be large.
        sha256: the manifest's digest.
    """

    manifest: str
    sha256: str
    parts: tuple[str, ...]
    class_names: tuple[str, ...] | None

    @property
    def streams(self) -> bool:
        return is_url(self.manifest)

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        manifest = known_manifest(self.manifest, self.sha256)
        with open_shard(manifest, part) as shard:
            if self.streams:
                _check_arrival(shard, manifest, self.parts[part])
            file = shard.file
            for slot in shard.slots.tolist():
                key = f"uid-{int(file.uid[slot])}" if shard.keys is None else shard.keys[slot]
                labels = tuple(self._class_name(label, part, key) for label in shard.labels(slot))
                place = file.offset[slot], file.size[slot], file.crc[slot]
                if self.streams:
                    content, _ = shard.image_file(slot)
                elif file.raw[slot]:
                    content = _RAW_PLACE.pack(*place, file.height[slot], file.width[slot])
                else:
                    content = _PLACE.pack(*place)
                yield Item(key, labels, content)

    def read(self, part: int, content: bytes) -> bytes:
        if self.streams:
            return content
        is_raw = len(content) == _RAW_PLACE.size
        position, size, crc, *shape = (_RAW_PLACE if is_raw else _PLACE).unpack(content)
        with Path(self.parts[part]).open("rb") as file:
            file.seek(position)
            data = file.read(size)
        if len(data) != size or crc32c(data) != crc:
            raise OSError(f"damaged in {self.parts[part]}: its checksum is wrong")
        return raw_to_png(data, *shape) if is_raw else data

    def _class_name(self, label: int, part: int, key: str) -> str:
        names = self.class_names or ()
        if label >= len(names):
            raise DataError(
                f"{self.parts[part]}: {key!r} has the label {label}; the manifest names {counted(len(names), 'class')}"
            )
        return names[label]


def open_dataset(src: str, files: Sequence[str], options: SourceOptions) -> DatasetSource:
    """The dataset at a path or URL: its folder, or its manifest.

    Raises:
        RecipeError: several datasets at once; options that name fields, which a dataset does not have.
        DataError, StorageError: a manifest that is missing or damaged, or a URL that does not answer.
    """
    refuse_fields(options, "a dataset")
    if len(files) != 1:
        raise RecipeError(f"SRC {src}: {len(files)} datasets; their classes may differ. Convert them one by one")
    manifest = Manifest.load(files[0])
    parts = tuple(manifest.location(shard.path) for shard in manifest.shards)
    return DatasetSource(manifest.where, manifest.sha256, parts, manifest.class_names or None)


def _check_arrival(shard: OpenShard, manifest: Manifest, where: str) -> None:
    found, expected = file_digests(shard.file.path).sha256, manifest.shards[shard.index].sha256
    if found != expected:
        raise DataError(f"{where}: damaged, there or on the way: sha256 {found}; the manifest says {expected}")
