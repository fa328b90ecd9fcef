"""The loader's threads at its edges: small parts of a batch, and an end that the garbage collector brings."""

import gc
import threading
import weakref

import pytest
from picture_shards import write_pictures

from vitscale.data import EvalTransform, Loader, TrainOrder
from vitscale.data import loader as loader_module

SHARDS = [20, 20]
VIEW = {"image_size": 8, "transform": EvalTransform()}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("threads") / "data", SHARDS)


def test_every_thread_has_work_in_a_small_part_of_a_batch(manifest, monkeypatch):
    """Many GPUs leave each rank few samples: 8 of them on 4 threads are decoded 4 at a time."""
    together, decode = threading.Barrier(4, timeout=20), loader_module.decode_slice

    def wait_for_the_others(*arguments):
        together.wait()
        decode(*arguments)

    monkeypatch.setattr(loader_module, "decode_slice", wait_for_the_others)
    with Loader(manifest, TrainOrder(SHARDS, 8, 0), threads=4, stop_step=2, **VIEW) as loader:
        assert len(list(loader)) == 2


class CollectingOrder(TrainOrder):
    """Collects garbage in the loader's own thread, at the worst moment: while that holds the lock of its pool."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.abandoned = threading.Event()
        self.pool = None

    def batch(self, *arguments):
        if self.pool is not None:
            assert self.abandoned.wait(20)
            with self.pool._shutdown_lock:
                gc.collect()
        return super().batch(*arguments)


def test_collected_by_its_own_thread(manifest):
    order = CollectingOrder(SHARDS, 8, 0)
    gc.disable()
    try:
        loader = Loader(manifest, order, prefetch=1, **VIEW)
        producer = loader._producer
        order.pool = producer._reader._pool
        loader.itself = loader  # a cycle: only the garbage collector ends it
        gone = weakref.ref(loader)
        next(loader)
        del loader
        order.abandoned.set()
        producer.join(20)
        assert gone() is None and not producer.is_alive()
    finally:
        gc.enable()
