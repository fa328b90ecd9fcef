"""A small dataset of awkward pictures: several sizes down to one pixel, gray ones, progressive ones."""

from pathlib import Path

from pictures import encoded, make_picture

from vitscale.data.shards import Manifest, ShardEntry, StoredSample, field_names, write_shard

SIZES = [(48, 40), (40, 48), (1, 1), (33, 97), (3, 200), (130, 20), (64, 64), (17, 31)]


def picture(uid: int) -> tuple[bytes, int, int]:
    """JPEG, height, width."""
    height, width = SIZES[uid % len(SIZES)]
    image = make_picture(uid, height, width)
    options = {"quality": 92, "progressive": uid % 7 < 2, "subsampling": 2 * (uid % 2)}
    return encoded(image.convert("L") if uid % 5 == 4 else image, **options), height, width


def write_pictures(folder: Path, shard_sizes: list[int], step: int = 3) -> Manifest:
    """Sample k has uid `step` * k and label k mod 4 - 1 (hence some without a label)."""
    folder.mkdir(parents=True)
    entries, done = [], 0
    for index, size in enumerate(shard_sizes):
        path = folder / f"shard-{index:05d}.beton"
        uids = [step * k for k in range(done, done + size)]
        done += size
        write_shard(path, (StoredSample(*picture(uid), uid // step % 4 - 1, uid) for uid in uids), size)
        entries.append(ShardEntry.of_file(path, samples=size, first_uid=uids[0]))
    return Manifest(
        fields=field_names(with_labels=False),
        num_samples=done,
        class_names=("a", "b", "c"),
        shuffle_seed=0,
        shards=tuple(entries),
    ).save(folder)
