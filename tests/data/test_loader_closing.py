"""The loader's threads end when it is closed, abandoned or collected; what it has handed over stays as it was."""

import gc
import threading
import time
import weakref
from operator import attrgetter

import numpy as np
import pytest
import torch
from loaders import SHARDS, loader_of, loader_threads, open_files, read, resident_bytes
from processes import wait_until

from vitscale.data import batch_reader as batch_reader_module
from vitscale.data.augmentation import EvalTransform
from vitscale.data.order import EvalOrder, TrainOrder

pytestmark = pytest.mark.usefixtures("nothing_stays")


def test_abandoned_loaders_leave_nothing(manifest):
    """100 of them: no threads, no files, no memory. A batch that each of them left would make 240 MB."""

    def abandon(count):
        for number in range(count):
            # Given up at once, or with a batch left, or none; in some the planner waits to get rid of one.
            stop_step = None if number % 9 == 0 else 2
            loader = loader_of(manifest, threads=2, prefetch=3, side=224, stop=stop_step)
            for _ in range((0, 1, 2, 1, 2, 1, 2, 1)[number % 8]):
                next(loader)
            del loader

    files = open_files()
    abandon(20)
    before = resident_bytes()
    abandon(100)
    assert wait_until(lambda: not loader_threads() and open_files() <= files)
    assert resident_bytes() - before < 100e6


def test_close_at_any_time(manifest):
    loader = loader_of(manifest)
    loader.close()
    loader.close()
    assert not loader_threads() and list(loader) == [] and loader.next_if_ready() is None
    with loader_of(manifest) as loader:
        batch = next(loader)
        copy = batch.images.clone()
    assert not loader_threads() and (batch.images == copy).all()
    with pytest.raises(KeyError, match="of the consumer"), loader_of(manifest) as loader:
        next(loader)
        raise KeyError("of the consumer")
    assert not loader_threads()


def test_close_does_not_wait_for_a_large_batch(manifest, monkeypatch):
    """Slices that have not begun are not begun."""
    order = TrainOrder([200_000], 200_000, 0)
    order.batch = lambda *_: EvalOrder([SHARDS[0]], 1).batch(0, 0, 200_000)
    order.upcoming = lambda *_: []
    calls, inner = [], batch_reader_module.decode_slice
    monkeypatch.setattr(
        batch_reader_module,
        "decode_slice",
        lambda *arguments, **options: (time.sleep(0.01), calls.append(1), inner(*arguments, **options))[2],
    )
    loader = loader_of(manifest, order, threads=1)
    assert wait_until(lambda: len(calls) >= 2)
    loader.close()  # 6,250 slices would take more than a minute
    assert len(calls) < 1000


def test_closing_from_another_thread_releases_a_waiting_consumer(manifest):
    gate = threading.Event()

    class Slow(EvalTransform):
        def boxes(self, keys, heights, widths):
            gate.wait(30)
            return super().boxes(keys, heights, widths)

    loader = loader_of(manifest, EvalOrder(SHARDS, 8), transform=Slow())
    ended = []
    consumer = threading.Thread(target=lambda: ended.append(list(loader)))
    consumer.start()
    time.sleep(0.05)
    closer = threading.Thread(target=loader.close)
    closer.start()
    time.sleep(0.05)
    gate.set()
    consumer.join(20)
    closer.join(20)
    assert not consumer.is_alive() and not closer.is_alive() and ended == [[]]


def test_a_slow_consumer_bounds_what_is_read_ahead(manifest):
    steps = []

    class Counted(TrainOrder):
        def batch(self, step, *slots):
            steps.append(step)
            return super().batch(step, *slots)

    with loader_of(manifest, Counted(SHARDS, 16, 0), prefetch=3) as loader:
        next(loader)
        assert wait_until(lambda: max(steps) == 4)  # one taken, three waiting, one that waits to be put
        time.sleep(0.3)
        assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("crew", ["_workers", "_shards._openers", "_shards._bringers"])
def test_a_loader_may_be_collected_by_a_thread_of_its_own(manifest, crew, monkeypatch):
    """A cycle with a loader in it: no thread waits for itself."""
    monkeypatch.setattr("vitscale.data.loader._CLOSE_SECONDS", 100.0)
    loader = loader_of(manifest)
    next(loader)
    engine, collected = loader._engine, threading.Event()
    threads = attrgetter(crew)(engine)
    loader.itself = loader
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        threads.submit(lambda: (gc.collect(), collected.set()))
        assert collected.wait(20)
    finally:
        gc.enable()
    engine.join(20)
    assert gone() is None and not engine.is_alive()


class CollectingOrder(TrainOrder):
    """Collects garbage in the planner, at the worst moment: while that holds the locks of all crews."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.abandoned = threading.Event()
        self.engine = None

    def batch(self, *arguments):
        if self.engine is not None:
            assert self.abandoned.wait(20)
            shards = self.engine._shards
            with self.engine._workers._changed, shards._openers._changed, shards._bringers._changed:
                gc.collect()
        return super().batch(*arguments)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # what is raised while it is collected
def test_a_loader_may_be_collected_by_its_planner(manifest):
    order = CollectingOrder(SHARDS, 8, 0)
    gc.disable()
    try:
        loader = loader_of(manifest, order, prefetch=1)
        engine = order.engine = loader._engine
        loader.itself = loader  # a cycle: only the garbage collector ends it
        gone = weakref.ref(loader)
        next(loader)
        del loader
        order.abandoned.set()
        engine.join(20)
        assert gone() is None and not engine.is_alive()
    finally:
        gc.enable()


KEPT = {
    "a batch": lambda batch: batch,
    "a slice": lambda batch: batch.images[3:5],
    "another shape": lambda batch: batch.images.permute(0, 3, 1, 2).flatten(2),
    "an array": lambda batch: batch.images.numpy(),
    "a slice of an array": lambda batch: batch.images.numpy()[3:5][1],
    "a tensor of an array": lambda batch: torch.from_numpy(batch.images.numpy()[4:]),
    "dlpack": lambda batch: torch.from_dlpack(batch.images[1:]),
    "a buffer": lambda batch: memoryview(batch.images.numpy()),
    "the rest": lambda batch: (batch.labels[2:], batch.uids.numpy(), batch.keys[1], batch.mask),
}


def copies_of(kept):
    parts = kept if isinstance(kept, tuple) else [getattr(kept, "images", kept)]
    return [np.array(part.numpy() if isinstance(part, torch.Tensor) else part) for part in parts]


@pytest.mark.parametrize("kind", KEPT)
def test_nothing_is_overwritten_while_anything_of_it_is_seen(manifest, kind):
    with loader_of(manifest, prefetch=1) as loader:
        kept, before = [], []
        for _ in range(6):
            kept.append(KEPT[kind](next(loader)))
            before.append(copies_of(kept[-1]))
        gc.collect()
        for _ in range(30):
            next(loader)
    del loader
    gc.collect()
    read(manifest, stop=10)
    for one, copies in zip(kept, before, strict=True):
        for now, copy in zip(copies_of(one), copies, strict=True):
            assert np.array_equal(now, copy)


def test_memory_is_used_again(manifest):
    """Also after parts of it were kept for a while: few places for 300 batches."""
    with loader_of(manifest, prefetch=2, side=64) as loader:
        kept = [next(loader).images[2:4] for _ in range(5)]
        next(loader)
        del kept
        places = {next(loader).images.data_ptr() for _ in range(300)}
    assert len(places) <= 5 + 2 + 4
