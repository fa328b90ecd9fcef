"""Datasets with tables of provenance, written sample by sample as a test says; digests by other libraries than ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
from pictures import encoded, make_picture

from vitscale.data.shards import Manifest, ShardEntry, StoredSample, field_names, write_shard
from vitscale.data.shards.provenance import PROVENANCE, provenance_path, write_provenance


@dataclass(frozen=True)
class Photo:
    """A sample to be stored: its key, its labels, and its picture by seed, height and width."""

    key: str
    labels: tuple[int, ...] = (0,)
    seed: int = 0
    height: int = 24
    width: int = 32
    source: bytes = b""  # "" for the stored bytes themselves
    quality: int = 90

    @property
    def jpeg(self) -> bytes:
        return encoded(make_picture(self.seed, self.height, self.width), quality=self.quality)


def write_one_shard(
    folder: Path, samples: Sequence[StoredSample], class_names: Sequence[str] = ("a", "b"), first_uid: int = 0
) -> Manifest:
    """A dataset of one shard, whatever its samples are, without a table of provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "shard-00000.beton", samples)
    entry = ShardEntry.of_file(folder / "shard-00000.beton", samples=len(samples), first_uid=first_uid)
    fields, names = field_names(with_labels=False), tuple(class_names)
    return Manifest(fields=fields, num_samples=len(samples), class_names=names, shuffle_seed=0, shards=(entry,)).save(
        folder
    )


def write_dataset(
    folder: Path,
    photos: Sequence[Photo],
    shard_samples: int,
    class_names: Sequence[str] = ("cat", "dog"),
    seed: int = 0,
    options: dict[str, object] | None = None,
) -> Manifest:
    """A dataset of these samples, in this order; its shards hold lists of labels if any sample has several."""
    folder.mkdir(parents=True, exist_ok=True)
    several = any(len(photo.labels) > 1 for photo in photos)
    entries = []
    for first in range(0, len(photos), shard_samples):
        path = folder / f"shard-{first // shard_samples:05d}.beton"
        samples, rows = [], []
        for uid, photo in enumerate(photos[first : first + shard_samples], first):
            jpeg = photo.jpeg
            labels = np.array(photo.labels, np.int32) if several else None
            label = photo.labels[0] if photo.labels else -1
            samples.append(StoredSample(jpeg, photo.height, photo.width, label, uid, labels))
            rows.append(
                {
                    **{"uid": uid, "key": photo.key, "labels": list(photo.labels), "height": photo.height},
                    **{"width": photo.width, "size": len(jpeg), "crc32c": google_crc32c.value(jpeg)},
                    **{"sha256": sha256(photo.source or jpeg).digest(), "passed_through": not photo.source},
                    **{"pixels": uid, "pdq": bytes(32), "pdq_quality": 0, "pdq_trimmed": None},
                }
            )
        write_shard(path, samples, shard_samples)
        write_provenance(provenance_path(path), pa.Table.from_pylist(rows, PROVENANCE), "none")
        entries.append(ShardEntry.of_file(path, samples=len(samples), first_uid=first))
    return Manifest(
        fields=field_names(with_labels=several),
        num_samples=len(photos),
        class_names=tuple(class_names),
        shuffle_seed=seed,
        options=options or {"shard_samples": shard_samples},
        shards=tuple(entries),
    ).save(folder)
