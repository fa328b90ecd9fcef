"""A dataset of generated pictures, the same with damaged samples, and a view of it that leaves these out."""

from pathlib import Path

from small_files import excluding, flip_images

from vitscale.data.shards import SelectExclude
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
            flip_images(spoilt.shard_path(index), *damaged[index])
            select = excluding(view, f"excluded-{index}.npy", damaged[index])
        entries.append(entry.model_copy(update={"path": f"../sound/{entry.path}", "select": select}))
    count = sum(entry.num_selected for entry in entries)
    manifest.model_copy(update={"num_samples": count, "shards": tuple(entries)}).save(view)
