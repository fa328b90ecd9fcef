"""Datasets that something has happened to; each function says which slots of a shard."""

import os
from functools import partial

import numpy as np
from small_files import flip, flip_images

from vitscale.data.shards import Manifest, ShardFile, StoredSample, write_shard
from vitscale.ground.files.digests import file_digests

METADATA, ROW = 24 + 4 * 1041, 40  # bytes: header and four fields; one sample's record
WIDTH, CRC = 1, 32  # where they stand in a record


def flip_byte(manifest: Manifest, index: int, slots: list[int]) -> Manifest:
    """A byte of the stored images is another."""
    flip_images(manifest.shard_path(index), *slots)
    return manifest


def misstate(column: int, manifest: Manifest, index: int, slots: list[int]) -> Manifest:
    """The shard states another value of sound images."""
    for slot in slots:
        flip(manifest.shard_path(index), METADATA + slot * ROW + column)
    return manifest


misstate_size, misstate_checksums = partial(misstate, WIDTH), partial(misstate, CRC)


def store_zeros(manifest: Manifest, index: int, slots: list[int]) -> Manifest:
    """Zeros were stored, with their checksum, in a shard that is as the manifest lists it."""
    path = manifest.shard_path(index)
    with ShardFile(path) as shard:
        rows = np.stack([shard.height, shard.width, shard.label, shard.uid], axis=1).tolist()
        images = [bytes(size) if slot in slots else shard.read(slot) for slot, size in enumerate(shard.size.tolist())]
    samples = [StoredSample(image, *row) for image, row in zip(images, rows, strict=True)]
    write_shard(path, samples)
    entry = manifest.shards[index].model_copy(update=file_digests(path)._asdict())
    shards = (*manifest.shards[:index], entry, *manifest.shards[index + 1 :])
    return manifest.model_copy(update={"shards": shards}).save(manifest.directory)


def cut_before(manifest: Manifest, index: int, slot: int) -> None:
    """The file ends where this slot's image begins."""
    with ShardFile(manifest.shard_path(index)) as shard:
        offset = int(np.asarray(shard.offset)[slot])
    os.truncate(manifest.shard_path(index), offset)


SILENT = {"flipped byte": flip_byte, "misstated size": misstate_size, "misstated checksum": misstate_checksums}
"""Damage that has come after the manifest."""

KINDS = {**SILENT, "zeros": store_zeros}
