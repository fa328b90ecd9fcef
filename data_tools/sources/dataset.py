"""Another dataset of vitscale as a source: its selected samples, under the keys that it gave them."""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_tools.sources.source import Item, SourceOptions, refuse_fields
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import known_manifest, open_shard, raw_to_png
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
    """

    manifest: str  # its path or URL; not the manifest itself, which may be large
    sha256: str  # the manifest's digest
    parts: tuple[str, ...]
    class_names: tuple[str, ...] | None

    @property
    def streams(self) -> bool:
        return is_url(self.manifest)

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        manifest, names = known_manifest(self.manifest, self.sha256), self.class_names or ()
        with open_shard(manifest, part) as shard:
            file, stated = shard.file, manifest.shards[part].sha256
            if self.streams and (sha256 := file_digests(file.path).sha256) != stated:
                raise DataError(
                    f"{self.parts[part]}: damaged, there or on the way: sha256 {sha256}; the manifest says {stated}"
                )
            for slot in shard.slots.tolist():
                key = f"uid-{int(file.uid[slot])}" if shard.keys is None else shard.keys[slot]
                numbers = shard.labels(slot)
                if unknown := [number for number in numbers if number >= len(names)]:
                    raise DataError(
                        f"{self.parts[part]}: {key!r} has the label {unknown[0]}; the manifest names "
                        f"{counted(len(names), 'class')}"
                    )
                place = file.offset[slot], file.size[slot], file.crc[slot]
                if self.streams:
                    content, _ = shard.image_file(slot)
                elif file.raw[slot]:
                    content = _RAW_PLACE.pack(*place, file.height[slot], file.width[slot])
                else:
                    content = _PLACE.pack(*place)
                yield Item(key, tuple(names[number] for number in numbers), content)

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
