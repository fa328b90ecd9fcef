"""Ranks in processes of their own, each of which reads its parts of many runs."""

import hashlib
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from loaders import loader_of

from vitscale.data.shards import Manifest


class Run(NamedTuple):
    """Steps [start, stop) of a training, as one rank of a world reads them."""

    rank: int
    world: int
    start: int
    stop: int
    threads: int = 1
    prefetch: int = 2
    dct_scaling: bool = False


class Part(NamedTuple):
    """What a rank gets of a step; of each sample its uid, label, key, and a hash of its pixels."""

    step: int
    epoch: int
    samples: list[tuple[int, int, int, str]]
    digest: int


def read(folder: str, batch: int, side: int, run: Run) -> list[Part]:
    """One rank's part of one run."""
    with loader_of(Manifest.load(folder), batch=batch, side=side, **run._asdict()) as loader:
        return [_part(one) for one in loader]


def _part(batch):
    assert batch.mask.all()
    hashes = [hashlib.blake2b(image.numpy().tobytes(), digest_size=8).hexdigest() for image in batch.images]
    samples = list(zip(batch.uids.tolist(), batch.labels.tolist(), batch.keys.tolist(), hashes, strict=True))
    return Part(batch.position, batch.epoch, samples, batch.digest)


def global_batches(parts_of_ranks: Iterable[list[Part]]) -> list[Part]:
    """What the ranks have together, step by step."""
    found = []
    for parts in zip(*parts_of_ranks, strict=True):
        assert len({(part.step, part.epoch, len(part.samples)) for part in parts}) == 1
        samples = [sample for part in parts for sample in part.samples]
        found.append(Part(parts[0].step, parts[0].epoch, samples, sum(part.digest for part in parts) % 2**64))
    return found


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """New processes of this machine, that share nothing with this one."""
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        yield pool


def in_processes(pool, folder: str, batch: int, side: int, worlds: list[list[Run]]) -> list[list[Part]]:
    """The global batches of each of these worlds, all ranks of which run somewhere in the pool."""
    waiting = [[pool.submit(read, folder, batch, side, run) for run in world] for world in worlds]
    return [global_batches(future.result(300) for future in futures) for futures in waiting]


def world_of(size: int, start: int, stop: int, **options) -> list[Run]:
    return [Run(rank, size, start, stop, **options) for rank in range(size)]
