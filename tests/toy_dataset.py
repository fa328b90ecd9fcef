"""Datasets for tests: shards of generated pictures whose colour tells their class."""

from pathlib import Path

import numpy as np
from pictures import encoded
from PIL import Image

from vitscale.shards import Manifest, ShardEntry, StoredSample, field_names, write_shard

CLASS_NAMES = ("red", "green", "blue", "gray", "cyan", "yellow", "violet")
HUES = np.array(
    [(190, 60, 60), (60, 190, 60), (60, 60, 190), (120, 120, 120), (60, 190, 190), (190, 190, 60), (190, 60, 190)]
)


def write_toy_dataset(folder: Path, shard_sizes: list[int], seed: int = 0) -> Manifest:
    """Shards of 24 x 24 to 40 x 40 pictures in seven classes, and their manifest."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    entries, uid = [], 0
    for index, size in enumerate(shard_sizes):
        path = folder / f"shard-{index:05d}.beton"
        samples = []
        for _ in range(size):
            label = int(rng.integers(len(CLASS_NAMES)))
            height, width = (int(side) for side in rng.integers(24, 41, 2))
            pixels = np.clip(HUES[label] + rng.normal(0, 40, (height, width, 3)), 0, 255).astype(np.uint8)
            jpeg = encoded(Image.fromarray(pixels), quality=90)
            samples.append(StoredSample(jpeg, height, width, label, uid))
            uid += 1
        write_shard(path, samples, size)
        entries.append(ShardEntry.of_file(path, samples=size, first_uid=uid - size))
    manifest = Manifest(
        fields=field_names(with_labels=False),
        num_samples=uid,
        class_names=CLASS_NAMES,
        shuffle_seed=seed,
        shards=tuple(entries),
    )
    return manifest.save(folder)
