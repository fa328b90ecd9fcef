"""Loaders of small datasets; in the order of training, and without a last step, they go round for ever."""

import threading
from dataclasses import fields, replace
from pathlib import Path

import torch

from vitscale.data.augmentation import EvalTransform, TrainTransform
from vitscale.data.loader import Loader
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading

SHARDS = [40, 33, 40, 7]
SEED = 9  # of the views


def loader_of(manifest, order=None, *, batch=16, side=8, start=0, stop=None, **options):
    """In batches of `batch` unless an order is given; views as training or, in its order, evaluation takes them.

    Options are those of `Loader` and of `Reading`.
    """
    order = order or TrainOrder([shard.num_selected for shard in manifest.shards], batch, 4)
    transform = EvalTransform() if isinstance(order, EvalOrder) else TrainTransform()
    usual = {"image_size": side, "transform": transform, "seed": SEED, "digest": True}
    of_reading = {field.name for field in fields(Reading)} & options.keys()
    reading = Reading(**{name: options.pop(name) for name in of_reading})
    return Loader(manifest, order, start_step=start, stop_step=stop, reading=reading, **usual | options)


def read(*arguments, **options):
    """All batches of such a loader."""
    with loader_of(*arguments, **options) as loader:
        return list(loader)


def joined(ranks):
    """The global batches of which each rank read its part."""
    for parts in zip(*ranks, strict=True):
        assert len({(part.position, part.epoch, len(part.uids)) for part in parts}) == 1
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("labels", "uids", "mask")}
        of_kinds = {
            name: tuple(map(torch.cat, zip(*(getattr(part, name) for part in parts), strict=True)))
            for name in ("views", "view_keys")
        }
        bad, digest = sum(part.bad_samples for part in parts), sum(part.digest for part in parts) % 2**64
        yield replace(parts[0], **tensors, **of_kinds, bad_samples=bad, digest=digest)


def same(found, expected):
    """Whether batches are equal in everything."""

    def contents(batch):
        tensors = batch.labels, batch.uids, batch.mask, *batch.views, *batch.view_keys
        stored = [(tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for tensor in tensors]
        return batch.position, batch.epoch, batch.bad_samples, batch.digest, stored

    return list(map(contents, found)) == list(map(contents, expected))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitscale-data")]


def open_files():
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def resident_bytes():
    import psutil

    return psutil.Process().memory_info().rss
