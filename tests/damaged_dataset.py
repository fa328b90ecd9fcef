"""A dataset of generated pictures, the same with damaged samples, and a view of it that leaves these out."""

import hashlib
from pathlib import Path

import numpy as np

from vitscale.data.shards import ExcludedSlots, SelectExclude, ShardFile
from vitscale.data.shards.generated import write_generated_dataset


def write_damaged(root: Path, shard_sizes: list[int], damaged: dict[int, list[int]], seed: int = 0) -> None:
    """Write `sound`, `damaged` and `without` under `root`; `damaged` are slots by shard."""
    manifest = write_generated_dataset(root / "sound", shard_sizes, seed)
    spoilt = write_generated_dataset(root / "damaged", shard_sizes, seed)
    view = root / "without"
    view.mkdir()
    entries = []
    for index, entry in enumerate(manifest.shards):
        select: str | SelectExclude = "all"
        if index in damaged:
            slots = np.array(damaged[index], np.uint32)
            _flip_a_byte_of_each(spoilt.shard_path(index), slots.tolist())
            excluded = view / f"excluded-{index}.npy"
            np.save(excluded, slots)
            digest = hashlib.sha256(excluded.read_bytes()).hexdigest()
            select = SelectExclude(exclude=ExcludedSlots(path=excluded.name, sha256=digest, count=len(slots)))
        entries.append(entry.model_copy(update={"path": f"../sound/{entry.path}", "select": select}))
    count = sum(entry.num_selected for entry in entries)
    manifest.model_copy(update={"num_samples": count, "shards": tuple(entries)}).save(view)


def _flip_a_byte_of_each(path: Path, slots: list[int]) -> None:
    with ShardFile(path) as shard:
        places = [int(shard.offset[slot] + shard.size[slot] // 2) for slot in slots]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
