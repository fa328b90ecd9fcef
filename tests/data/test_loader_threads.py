"""The loader's threads: what they hand over stays, what goes wrong in them is told, and they end."""

import gc
import resource
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from leaks import loader_threads, open_files, resident_bytes, wait_until
from picture_shards import write_pictures

from vitscale.data import EvalOrder, EvalTransform, Loader, Reading, TrainOrder, TrainTransform
from vitscale.data import batch_reader as batch_reader_module
from vitscale.data import open_shards as open_shards_module
from vitscale.data.buffers import Buffers
from vitscale.errors import StorageError

SHARDS = [40, 33, 40, 7]
CRCS = 3  # among the arguments of `decode_slice`


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("threads") / "data", SHARDS)


def endless(manifest, *, order=None, stop_step=None, rank=0, world=1, side=8, **reading):
    return Loader(
        manifest,
        order or TrainOrder(SHARDS, 16, 0),
        image_size=side,
        transform=TrainTransform(),
        rank=rank,
        world=world,
        stop_step=stop_step,
        reading=Reading(**reading),
        digest=True,
    )


@pytest.fixture(autouse=True)
def nothing_stays():
    files = open_files()
    yield
    if loader_threads() or open_files() > files:
        gc.collect()
        assert wait_until(lambda: not loader_threads() and open_files() <= files)


# ----------------------------------------------------------------------------------------------- what was handed out

KEPT = {
    "a batch": lambda batch: batch,
    "a tensor": lambda batch: batch.images,
    "a slice": lambda batch: batch.images[3:5],
    "a pixel": lambda batch: batch.images[7, 2, 2],
    "another shape": lambda batch: batch.images.permute(0, 3, 1, 2).flatten(2),
    "an array": lambda batch: batch.images.numpy(),
    "a slice of an array": lambda batch: batch.images.numpy()[3:5][1],
    "an array of a slice": lambda batch: batch.images[2:][1:].numpy()[2:],
    "a tensor of an array": lambda batch: torch.from_numpy(batch.images.numpy()[4:]),
    "another type": lambda batch: batch.images.view(torch.int8),
    "dlpack": lambda batch: torch.from_dlpack(batch.images[1:]),
    "a buffer": lambda batch: memoryview(batch.images.numpy()),
    "the rest": lambda batch: (batch.labels[2:], batch.uids.numpy(), batch.keys[1], batch.mask),
}
IN_EVERY_RUN = {"a slice of an array", "dlpack", "the rest"}  # `make test-all` takes them all


def copies_of(kept):
    parts = kept if isinstance(kept, tuple) else [getattr(kept, "images", kept)]
    return [np.array(part.numpy() if isinstance(part, torch.Tensor) else part) for part in parts]


@pytest.mark.parametrize(
    "kind", [kind if kind in IN_EVERY_RUN else pytest.param(kind, marks=pytest.mark.slow) for kind in KEPT]
)
def test_nothing_is_overwritten_while_anything_of_it_is_seen(manifest, kind):
    with endless(manifest, prefetch=1) as loader:
        kept, before = [], []
        for _ in range(6):
            kept.append(KEPT[kind](next(loader)))
            before.append(copies_of(kept[-1]))
            gc.collect()
        for _ in range(30):
            next(loader)
    for one, copies in zip(kept, before, strict=True):
        for now, copy in zip(copies_of(one), copies, strict=True):
            assert np.array_equal(now, copy)


def test_memory_is_used_again(manifest):
    """Also after parts of it were kept for a while: few places for 300 batches."""
    with endless(manifest, prefetch=2, side=64) as loader:
        kept = [next(loader).images[2:4] for _ in range(5)]
        next(loader)
        del kept
        places = {next(loader).images.data_ptr() for _ in range(300)}
    assert len(places) <= 5 + 2 + 4


def test_buffers():
    """In memory that is given back to nobody: the same places, and only when they are free."""
    buffers = Buffers((2, 3), pinned=False)
    first, second = buffers.take(), buffers.take()
    place, part = first.data_ptr(), first[1]
    del first
    assert buffers.take().data_ptr() not in (place, second.data_ptr())
    third = buffers.take()
    del part
    assert buffers.take().data_ptr() == place and third.data_ptr() != place


def test_what_was_handed_out_outlives_the_loader(manifest):
    loader = endless(manifest)
    batches = [next(loader) for _ in range(3)]
    copies = [batch.images.clone() for batch in batches]
    loader.close()
    del loader
    gc.collect()
    with endless(manifest) as other:
        for _ in range(10):
            next(other)
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, copies, strict=True))


# ------------------------------------------------------------------------------------------------------- next_if_ready


def test_next_if_ready_neither_skips_nor_repeats(manifest):
    with endless(manifest, stop_step=40) as loader:
        expected = [(batch.step, batch.digest) for batch in loader]
    for pattern in ((True,), (False, True), (True, True, False), (True, False, False, True)):
        found, turn = [], 0
        with endless(manifest, stop_step=40) as loader:
            while len(found) < 40:
                batch = loader.next_if_ready() if pattern[turn % len(pattern)] else next(loader)
                turn += 1
                if batch is not None:
                    found.append((batch.step, batch.digest))
            assert next(loader, None) is None
        assert found == expected


def test_next_if_ready_does_not_swallow_the_end(manifest):
    """It comes again when it is waited for."""
    with endless(manifest, stop_step=2) as loader:
        assert [next(loader).step, next(loader).step] == [0, 1]
        time.sleep(0.1)
        assert [loader.next_if_ready() for _ in range(5)] == [None] * 5
        assert next(loader, None) is None
        assert loader.next_if_ready() is None and next(loader, None) is None


class FailingOrder(TrainOrder):
    def batch(self, step, *slots):
        if step == 3:
            raise ZeroDivisionError("of step 3")
        return super().batch(step, *slots)


def test_next_if_ready_leaves_what_went_wrong_to_next(manifest):
    with endless(manifest, order=FailingOrder(SHARDS, 16, 0)) as loader:
        for step in range(3):
            assert next(loader).step == step
        time.sleep(0.1)
        assert loader.next_if_ready() is None
        with pytest.raises(ZeroDivisionError, match="of step 3"):
            next(loader)


def test_next_if_ready_does_not_wait(manifest):
    gate = threading.Event()

    class Waiting(TrainOrder):
        def batch(self, *arguments):
            gate.wait(30)
            return super().batch(*arguments)

    with endless(manifest, order=Waiting(SHARDS, 16, 0)) as loader:
        assert loader.next_if_ready() is None
        gate.set()
        assert next(loader).step == 0


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_in_planning_comes_in_its_turn(manifest, error, threads):
    class Broken(TrainOrder):
        def batch(self, step, *slots):
            if step == 4:
                raise error("in the planner")
            return super().batch(step, *slots)

    steps = []
    with endless(manifest, order=Broken(SHARDS, 16, 0), threads=threads) as loader:
        with pytest.raises(error, match="in the planner"):
            for batch in loader:
                steps.append(batch.step)
        assert not loader_threads() and next(loader, None) is None  # it has ended
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_in_reading_comes_in_its_turn(manifest, error, threads, monkeypatch):
    """Batches that are done earlier wait for those before them, and so do errors."""
    inner, firsts = batch_reader_module.decode_slice, []

    def noting(*arguments, **options):
        firsts.append(arguments[CRCS][0])
        inner(*arguments, **options)

    def failing(*arguments, **options):
        if arguments[CRCS][0] == firsts[4 * len(firsts) // 5]:
            time.sleep(0.05)
            raise error("of a slice")
        inner(*arguments, **options)

    monkeypatch.setattr(batch_reader_module, "decode_slice", noting)
    with endless(manifest, threads=1, stop_step=5) as loader:
        assert len(list(loader)) == 5
    monkeypatch.setattr(batch_reader_module, "decode_slice", failing)
    steps = []
    with endless(manifest, threads=threads, prefetch=3) as loader:
        with pytest.raises(error, match="of a slice"):
            for batch in loader:
                steps.append(batch.step)
        assert not loader_threads() and next(loader, None) is None
    assert steps == [0, 1, 2, 3]


def test_what_goes_wrong_wakes_a_consumer_that_waits(manifest):
    gate = threading.Event()

    class Broken(EvalTransform):
        def boxes(self, keys, heights, widths):
            gate.wait(30)
            raise ZeroDivisionError("at last")

    loader = Loader(manifest, EvalOrder(SHARDS, 8), image_size=8, transform=Broken())
    threading.Timer(0.3, gate.set).start()
    with pytest.raises(ZeroDivisionError, match="at last"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_no_memory_for_a_picture(manifest, monkeypatch):
    """Is no damage of it, whatever the policy for that is."""

    def without_memory(*arguments, resize):
        arguments[-1][:] = batch_reader_module.NO_MEMORY

    monkeypatch.setattr(batch_reader_module, "decode_slice", without_memory)
    for policy in ("error", "substitute", "mask"):
        with endless(manifest, bad_samples=policy) as loader, pytest.raises(MemoryError):
            next(loader)


def test_a_read_that_does_not_return_is_reported_by_name(manifest, monkeypatch):
    """What waits is let go in the end, as a network that comes back does; the loader has given it up by then."""
    monkeypatch.setattr("vitscale.data.loader._CLOSE_SECONDS", 0.2)
    gate, preadv = threading.Event(), batch_reader_module.os.preadv

    def stuck(fd, buffers, offset):
        gate.wait(30)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(batch_reader_module.os, "preadv", stuck)
    files = open_files()
    loader = endless(manifest, stall_s=2.0)  # opening is to be done within that, on a busy machine too
    try:
        with pytest.raises(StorageError, match=r"reading .*shard-0000\d\.beton slot \d+ has not returned for \d+ s"):
            next(loader)
        assert next(loader, None) is None
        assert open_files() > files  # else it would read from another file of the same number in the end
        monkeypatch.undo()
    finally:
        gate.set()


def test_slow_is_not_stalled(manifest, monkeypatch):
    """Many reads that take their time each, longer together than the limit."""
    preadv = batch_reader_module.os.preadv
    monkeypatch.setattr(batch_reader_module.os, "preadv", lambda *args: (time.sleep(0.1), preadv(*args))[1])
    with endless(manifest, stall_s=2.5, threads=1, stop_step=2) as loader:
        assert len(list(loader)) == 2  # 32 of them


# --------------------------------------------------------------------------------------------------------------- ends


def test_abandoned_loaders_leave_nothing(manifest):
    """200 of them: no threads, no files, no memory. A batch that each of them left would make 480 MB."""

    def abandon(count):
        for number in range(count):
            # Given up at once, or with a batch left, or none; in some the planner waits to get rid of one.
            stop_step = None if number % 9 == 0 else 2
            loader = endless(manifest, threads=2, prefetch=3, side=224, stop_step=stop_step)
            for _ in range((0, 1, 2, 1, 2, 1, 2, 1)[number % 8]):
                next(loader)
            del loader

    files = open_files()
    abandon(20)
    before = resident_bytes()
    abandon(200)
    assert wait_until(lambda: not loader_threads() and open_files() <= files)
    assert resident_bytes() - before < 100e6


def test_leaving_a_loop(manifest):
    for batch in endless(manifest):
        if batch.step == 3:
            break
    gc.collect()
    assert wait_until(lambda: not loader_threads())


def test_close_at_any_time(manifest):
    loader = endless(manifest)
    loader.close()
    loader.close()
    assert not loader_threads() and list(loader) == [] and loader.next_if_ready() is None
    with endless(manifest) as loader:
        batch = next(loader)
        copy = batch.images.clone()
    assert not loader_threads() and (batch.images == copy).all()
    with pytest.raises(KeyError, match="of the consumer"), endless(manifest) as loader:
        next(loader)
        raise KeyError("of the consumer")
    assert not loader_threads()


def test_the_end_of_the_order_closes(manifest):
    loader = endless(manifest, stop_step=2)
    assert len(list(loader)) == 2 and not loader_threads()


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
    loader = endless(manifest, order=order, threads=1)
    assert wait_until(lambda: len(calls) >= 2)
    loader.close()  # 6,250 slices would take more than a minute
    assert len(calls) < 1000


def test_closing_from_another_thread_releases_a_waiting_consumer(manifest):
    gate = threading.Event()

    class Slow(EvalTransform):
        def boxes(self, keys, heights, widths):
            gate.wait(30)
            return super().boxes(keys, heights, widths)

    loader = Loader(manifest, EvalOrder(SHARDS, 8), image_size=8, transform=Slow())
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

    with endless(manifest, order=Counted(SHARDS, 16, 0), prefetch=3) as loader:
        next(loader)
        assert wait_until(lambda: max(steps) == 4)  # one taken, three waiting, one that waits to be put
        time.sleep(0.3)
        assert steps == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------------------------------- the garbage collector


@pytest.mark.parametrize("crew", ["readers", "openers", "bringers"])
def test_a_loader_may_be_collected_by_a_thread_of_its_own(manifest, crew, monkeypatch):
    """A cycle with a loader in it: no thread waits for itself."""
    monkeypatch.setattr("vitscale.data.loader._CLOSE_SECONDS", 100.0)
    loader = endless(manifest)
    next(loader)
    engine, collected = loader._engine, threading.Event()
    threads = {
        "readers": engine._crew,
        "openers": engine._shards._openers,
        "bringers": engine._shards._bringers,
    }[crew]
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
            with self.engine._crew._changed, shards._openers._changed, shards._bringers._changed:
                gc.collect()
        return super().batch(*arguments)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # what is raised while it is collected
def test_a_loader_may_be_collected_by_its_planner(manifest):
    order = CollectingOrder(SHARDS, 8, 0)
    gc.disable()
    try:
        loader = endless(manifest, order=order, prefetch=1)
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


# ------------------------------------------------------------------------------------------------------- work and files


def test_every_thread_has_work_in_a_small_part_of_a_batch(manifest, monkeypatch):
    """Many GPUs leave each rank few samples: 8 of them on 4 threads are decoded 4 at a time."""
    together, decode = threading.Barrier(4, timeout=60), batch_reader_module.decode_slice

    def wait_for_the_others(*arguments, **options):
        together.wait()
        decode(*arguments, **options)

    monkeypatch.setattr(batch_reader_module, "decode_slice", wait_for_the_others)
    with endless(manifest, order=TrainOrder(SHARDS, 8, 0), threads=4, stop_step=2) as loader:
        assert len(list(loader)) == 2


def test_what_is_needed_again_is_opened_once(manifest, monkeypatch):
    """And there are files enough for a batch of a large dataset."""
    opened, inner = [], open_shards_module.open_shard_file
    monkeypatch.setattr(open_shards_module, "open_shard_file", lambda *args: (opened.append(args[1]), inner(*args))[1])
    with endless(manifest, order=TrainOrder(SHARDS, 64, 0), stop_step=10) as loader:  # ten epochs
        for _ in loader:
            pass
    assert sorted(opened) == [0, 1, 2, 3]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or soft >= 4096 or soft == hard


@pytest.mark.parametrize("order", [TrainOrder, EvalOrder])
def test_what_nothing_near_needs_is_closed(tmp_path, order, monkeypatch):
    """Of 40 shards those stay open that this window or the next one reads, or a batch that is being made."""
    monkeypatch.setattr("vitscale.data.order.WINDOW_SAMPLES", 10)
    sizes = [5] * 40
    many = write_pictures(tmp_path / "data", sizes)
    order = EvalOrder(sizes, 5) if order is EvalOrder else TrainOrder(sizes, 5, 0)
    files, most = open_files(), 0
    with endless(many, order=order, stop_step=80, threads=1, prefetch=1, verify_shards=False) as loader:
        for _ in loader:
            most = max(most, open_files() - files)
    assert 2 <= most <= 3 * 2  # two shards a window; of the window before, batches that wait for the consumer


@pytest.mark.parametrize(
    "wrong", [{"rank": 2, "world": 2}, {"rank": -1}, {"world": 3}, {"threads": 0}, {"prefetch": 0}]
)
def test_impossible_settings(manifest, wrong):
    with pytest.raises(AssertionError):
        endless(manifest, **wrong)


@pytest.mark.slow
def test_memory_stays_as_it_is_over_ten_thousand_batches(manifest):
    with endless(manifest, side=32, prefetch=2) as loader:
        for _ in range(500):
            next(loader)
        gc.collect()
        before, most = resident_bytes(), 0
        for step in range(10_000):
            next(loader)
            if step % 500 == 499:
                most = max(most, resident_bytes())
    assert most - before < 8e6
