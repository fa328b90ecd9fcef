"""Datasets of generated pictures whose colour shows their class, for smoke runs and tests."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitscale.data.shards.beton import StoredSample, field_names, write_shard
from vitscale.data.shards.manifest import MANIFEST_NAME, Manifest, ShardEntry
from vitscale.ground.files.durable import durable_folder

CLASS_NAMES = ("red", "green", "blue", "gray", "cyan", "yellow", "violet")
_COLOURS = np.array(
    [(190, 60, 60), (60, 190, 60), (60, 60, 190), (120, 120, 120), (60, 190, 190), (190, 190, 60), (190, 60, 190)]
)


def write_generated_dataset(folder: Path, shard_sizes: list[int], seed: int = 0) -> Manifest:
    """Write shards of pictures of 24 x 24 to 40 x 40 pixels, the seven classes equally often, and their manifest.

    Equal arguments give equal bytes. A dataset that is already there is left as it is, so that several processes may
    call this at once: each writes to a folder of its own, and the first to finish renames it.
    """
    if not (folder / MANIFEST_NAME).exists():
        try:
            with durable_folder(folder) as aside:
                _write(aside, shard_sizes, seed)
        except OSError:
            if not (folder / MANIFEST_NAME).exists():  # otherwise another process was faster
                raise
    return Manifest.load(folder)


def _write(folder: Path, shard_sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(sum(shard_sizes)) % len(CLASS_NAMES))
    entries, uid = [], 0
    for index, size in enumerate(shard_sizes):
        path = folder / f"shard-{index:05d}.beton"
        samples = [_sample(rng, int(labels[slot]), slot) for slot in range(uid, uid + size)]
        write_shard(path, samples, size)
        entries.append(ShardEntry.of_file(path, samples=size, first_uid=uid))
        uid += size
    Manifest(
        fields=field_names(with_labels=False),
        num_samples=uid,
        class_names=CLASS_NAMES,
        shuffle_seed=seed,
        shards=tuple(entries),
    ).save(folder)


def _sample(rng: np.random.Generator, label: int, uid: int) -> StoredSample:
    height, width = (int(side) for side in rng.integers(24, 41, 2))
    pixels = np.clip(_COLOURS[label] + rng.normal(0, 40, (height, width, 3)), 0, 255).astype(np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(pixels).save(jpeg, "JPEG", quality=90)
    return StoredSample(jpeg.getvalue(), height, width, label, uid)
