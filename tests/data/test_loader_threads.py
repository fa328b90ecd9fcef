"""The loader's threads at work: what can be had without waiting, errors that come in their turn, and open files."""

import os
import resource
import threading
import time

import pytest
from loaders import SHARDS, loader_of, loader_threads, open_files, read
from picture_shards import write_pictures

from vitscale.data import batch_reader as batch_reader_module
from vitscale.data import open_shards as open_shards_module
from vitscale.data.order import EvalOrder, TrainOrder
from vitscale.data.settings import Reading
from vitscale.data.shards import ShardFile
from vitscale.ground.errors import StorageError
from vitscale.recipe import Data

CRCS = 3  # among the arguments of `decode_slice`

pytestmark = pytest.mark.usefixtures("nothing_stays")


def test_next_if_ready_neither_skips_nor_repeats(manifest):
    expected = [(batch.position, batch.digest) for batch in read(manifest, stop=40)]
    for pattern in ((True,), (False, True), (True, True, False), (True, False, False, True)):
        found, turn = [], 0
        with loader_of(manifest, stop=40) as loader:
            while len(found) < 40:
                batch = loader.next_if_ready() if pattern[turn % len(pattern)] else next(loader)
                turn += 1
                if batch is not None:
                    found.append((batch.position, batch.digest))
            assert next(loader, None) is None
        assert found == expected


def test_next_if_ready_does_not_swallow_the_end(manifest):
    with loader_of(manifest, stop=2) as loader:
        assert [next(loader).position, next(loader).position] == [0, 1]
        time.sleep(0.1)
        assert [loader.next_if_ready() for _ in range(5)] == [None] * 5
        assert next(loader, None) is None and not loader_threads()
        assert loader.next_if_ready() is None and next(loader, None) is None


def test_next_if_ready_does_not_wait(manifest):
    gate = threading.Event()

    class Waiting(TrainOrder):
        def batch(self, *arguments):
            gate.wait(30)
            return super().batch(*arguments)

    with loader_of(manifest, Waiting(SHARDS, 16, 0)) as loader:
        assert loader.next_if_ready() is None
        gate.set()
        assert next(loader).position == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_in_planning_comes_in_its_turn(manifest, error, threads):
    class Broken(TrainOrder):
        def batch(self, step, *slots):
            if step == 4:
                raise error("in the planner")
            return super().batch(step, *slots)

    with loader_of(manifest, Broken(SHARDS, 16, 0), threads=threads) as loader:
        assert [next(loader).position for _ in range(4)] == [0, 1, 2, 3]
        time.sleep(0.1)
        assert loader.next_if_ready() is None
        with pytest.raises(error, match="in the planner"):
            next(loader)
        assert not loader_threads() and next(loader, None) is None  # it has ended


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_in_reading_comes_in_its_turn(manifest, error, threads, monkeypatch):
    """Batches that are done earlier wait for those before them, and so do errors; the consumer waits already."""
    order, inner = TrainOrder(SHARDS, 16, 0), batch_reader_module.decode_slice
    slots = order.batch(4, 0, 16)
    with ShardFile(manifest.shard_path(slots.shard[7])) as shard:
        crc = shard.crc[slots.position[7]]

    def failing(*arguments, **options):
        if crc in arguments[CRCS]:
            time.sleep(0.05)
            raise error("of a slice")
        inner(*arguments, **options)

    monkeypatch.setattr(batch_reader_module, "decode_slice", failing)
    steps = []
    with loader_of(manifest, order, threads=threads, prefetch=3) as loader:
        with pytest.raises(error, match="of a slice"):
            for batch in loader:
                steps.append(batch.position)
        assert not loader_threads() and next(loader, None) is None
    assert steps == [0, 1, 2, 3]


def test_no_memory_for_a_picture(manifest, monkeypatch):
    """Is no damage of it, whatever the policy for that is."""

    def without_memory(*arguments):
        arguments[-1][:] = batch_reader_module.NO_MEMORY

    monkeypatch.setattr(batch_reader_module, "decode_slice", without_memory)
    for policy in ("error", "substitute", "mask"):
        with loader_of(manifest, bad_samples=policy) as loader, pytest.raises(MemoryError):
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
    loader = loader_of(manifest, stall_s=2.0)  # opening is to be done within that, on a busy machine too
    try:
        with pytest.raises(StorageError, match=r"shard-0000\d\.beton slot \d+ .* \d+ s"):
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
    assert len(read(manifest, stall_s=2.5, threads=1, stop=2)) == 2  # 32 of them


def test_every_thread_has_work_in_a_small_part_of_a_batch(manifest, monkeypatch):
    """Many GPUs leave each rank few samples: 8 of them on 4 threads are decoded 4 at a time."""
    together, decode = threading.Barrier(4, timeout=60), batch_reader_module.decode_slice

    def wait_for_the_others(*arguments, **options):
        together.wait()
        decode(*arguments, **options)

    monkeypatch.setattr(batch_reader_module, "decode_slice", wait_for_the_others)
    assert len(read(manifest, TrainOrder(SHARDS, 8, 0), threads=4, stop=2)) == 2


def test_what_is_needed_again_is_opened_once(manifest, monkeypatch):
    """And there are files enough for a batch of a large dataset."""
    opened, inner = [], open_shards_module.open_shard_file
    monkeypatch.setattr(open_shards_module, "open_shard_file", lambda *args: (opened.append(args[1]), inner(*args))[1])
    read(manifest, TrainOrder(SHARDS, 64, 0), stop=10)  # ten epochs
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
    with loader_of(many, order, stop=80, threads=1, prefetch=1, verify_shards=False) as loader:
        for _ in loader:
            most = max(most, open_files() - files)
    assert 2 <= most <= 3 * 2  # two shards a window; of the window before, batches that wait for the consumer


@pytest.mark.parametrize(
    ("machine", "cores", "ranks", "threads"),
    [(192, 192, 8, 16), (112, 112, 8, 13), (112, 14, 8, 13), (32, 32, 1, 16), (8, 8, 4, 2), (1, 1, 1, 2)],
)
def test_beside_a_device_a_rank_s_part_of_the_cores_reads(monkeypatch, machine, cores, ranks, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Reading.of(Data(train="train"), pinned=True).threads == threads
    assert Reading.of(Data(train="train", threads=5), pinned=True).threads == 5
    assert Reading.of(Data(train="train")).threads == 2
