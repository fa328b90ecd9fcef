"""Damage of every kind is a DataError that says where; loaders end without leaving anything behind."""

import gc
import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from picture_shards import view, write_pictures

from vitscale.data import EvalOrder, EvalTransform, Loader, TrainOrder, TrainTransform
from vitscale.errors import DataError
from vitscale.shards import Manifest, ShardFile

SHARDS = [40, 33, 40, 7]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("damage") / "data", SHARDS)


@pytest.fixture
def manifest(original, tmp_path):
    """A copy that a test may damage."""
    return Manifest.load(shutil.copytree(original.directory, tmp_path / "data"))


def evaluate(manifest, **options):
    order = EvalOrder([shard.num_selected for shard in manifest.shards], 16)
    with Loader(manifest, order, image_size=8, transform=EvalTransform(), **options) as loader:
        return list(loader)


def endless(manifest, **options):
    order = TrainOrder([shard.num_selected for shard in manifest.shards], 16, 0)
    return Loader(manifest, order, image_size=8, transform=TrainTransform(), **options)


def wait_until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitscale-data")]


def open_files():
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.fixture(autouse=True)
def nothing_stays():
    files = open_files()
    yield
    if loader_threads() or open_files() > files:
        gc.collect()
        assert wait_until(lambda: not loader_threads() and open_files() <= files)


# -------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_flipped_byte_is_named_by_file_slot_and_uid(manifest, where, threads):
    slot, path = 21, manifest.shard_path(1)
    with ShardFile(path) as shard:
        offset, size, uid = int(shard.offset[slot]), int(shard.size[slot]), int(shard.uid[slot])
    content = bytearray(path.read_bytes())
    content[offset + {"first": 0, "middle": size // 2, "last": size - 1}[where]] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        evaluate(manifest, threads=threads)
    message = str(error.value)
    assert str(path) in message and f"slot {slot}" in message and f"uid {uid}" in message and "checksum" in message


def test_every_flipped_byte_is_found(manifest):
    path = manifest.shard_path(3)
    with ShardFile(path) as shard:
        offset, size = int(shard.offset[2]), int(shard.size[2])
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    small = Manifest.load(manifest.directory)
    order = EvalOrder([0, 0, 0, 7], 7)
    for at in rng.integers(0, size, 60):
        content = bytearray(sound)
        content[offset + at] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
        with (
            pytest.raises(DataError, match="slot 2, uid"),
            Loader(small, order, image_size=8, transform=EvalTransform(), threads=1) as loader,
        ):
            next(loader)


def test_a_picture_that_the_decoder_refuses(manifest):
    """Bytes that match their checksum and are no whole JPEG: a fault of whoever wrote the shard."""
    from vitscale.shards import StoredSample, file_digests, write_shard

    path = manifest.shard_path(3)
    with ShardFile(path) as shard:
        samples = [
            StoredSample(
                shard.read(slot)[: None if slot != 4 else -40],
                int(shard.height[slot]),
                int(shard.width[slot]),
                int(shard.label[slot]),
                int(shard.uid[slot]),
            )
            for slot in range(7)
        ]
    write_shard(path, samples)
    entry = manifest.shards[3].model_copy(update=file_digests(path)._asdict())
    changed = manifest.model_copy(update={"shards": (*manifest.shards[:3], entry)}).save(manifest.directory)
    with pytest.raises(DataError, match=rf"slot 4, uid {samples[4].uid}: the decoder refused it"):
        evaluate(changed)


@pytest.mark.parametrize("change", ["shorter", "longer", "empty"])
def test_a_file_of_another_size_than_the_manifest_says(manifest, change):
    path = manifest.shard_path(2)
    content = path.read_bytes()
    path.write_bytes({"shorter": content[:-1], "longer": content + b"\0", "empty": b""}[change])
    with pytest.raises(DataError, match=f"{path}.*{manifest.shards[2].bytes:,} bytes"):
        evaluate(manifest)


def test_a_vanished_file(manifest):
    manifest.shard_path(2).unlink()
    with pytest.raises(DataError, match=f"{manifest.shard_path(2)}: cannot be opened"):
        evaluate(manifest)


def test_a_file_truncated_while_it_is_read(manifest):
    """An error, not a SIGBUS."""
    loader = endless(manifest, prefetch=1)
    next(loader)
    for index in range(4):
        os.truncate(manifest.shard_path(index), 5000)
    with pytest.raises(DataError, match=r"shard-0000\d\.beton: image \d+ ends after 0 bytes"):
        for _ in loader:
            pass
    assert list(loader) == []  # it has ended


def test_a_file_removed_while_it_is_read_stays_readable(manifest):
    with endless(manifest) as loader:
        for _ in range(10):
            next(loader)
        shutil.rmtree(manifest.directory)
        steps = [next(loader).step for _ in range(20)]
    assert steps == list(range(10, 30))


def test_swapped_shards(manifest):
    """Of one size, sound in themselves, and not what the manifest lists."""
    entries = [json.loads(entry.model_dump_json()) for entry in manifest.shards]
    entries[0]["path"], entries[2]["path"] = entries[2]["path"], entries[0]["path"]
    for index in (0, 2):
        entries[index]["bytes"] = (manifest.directory / entries[index]["path"]).stat().st_size
    data = json.loads(manifest.path.read_text()) | {"shards": entries}
    manifest.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"shard-00002.*40 samples from uid 219; the manifest says 40 from 0"):
        evaluate(Manifest.load(manifest.directory))


def test_another_number_of_samples_than_the_manifest_says(manifest):
    entry = manifest.shards[0].model_copy(update={"samples": 39})
    changed = manifest.model_copy(update={"num_samples": 119, "shards": (entry, *manifest.shards[1:])})
    with pytest.raises(DataError, match="40 samples from uid 0; the manifest says 39"):
        evaluate(changed.save(manifest.directory))


def test_a_damaged_list_of_excluded_slots(manifest, tmp_path):
    subset = view(manifest, tmp_path / "view", first=5, excluded=[1, 2])
    (tmp_path / "view" / "excluded.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"excluded\.npy: damaged"):
        evaluate(subset)


def test_batches_before_the_damage_are_delivered(manifest):
    manifest.shard_path(3).unlink()
    order = EvalOrder(SHARDS, 8)
    with Loader(manifest, order, image_size=8, transform=EvalTransform()) as loader, pytest.raises(DataError):
        for found, batch in enumerate(loader):
            assert batch.step == found
    assert found == 113 // 8 - 1


def test_any_exception_reaches_the_consumer(original):
    class Broken(EvalTransform):
        def boxes(self, keys, heights, widths):
            raise ZeroDivisionError("in the reading thread")

    started = time.monotonic()
    with Loader(original, EvalOrder(SHARDS, 8), image_size=8, transform=Broken()) as loader:
        with pytest.raises(ZeroDivisionError, match="in the reading thread"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)
    assert time.monotonic() - started < 60  # no hang


# ----------------------------------------------------------------------------------------------------- ends and threads


@pytest.mark.parametrize("used", [0, 1, 3])
def test_abandoned_loaders_leave_no_threads_and_no_files(original, used):
    files = open_files()
    for _ in range(50):
        loader = endless(original, threads=2, prefetch=1 + used)
        for _ in range(used):
            next(loader)
        del loader
    assert wait_until(lambda: not loader_threads() and open_files() <= files)


def test_leaving_a_loop(original):
    for batch in endless(original):
        if batch.step == 3:
            break
    gc.collect()
    assert wait_until(lambda: not loader_threads())


def test_close_at_any_time(original):
    loader = endless(original)
    loader.close()
    loader.close()
    assert not loader_threads() and list(loader) == []
    with endless(original) as loader:
        batch = next(loader)
        copy = batch.images.clone()
    assert not loader_threads() and (batch.images == copy).all()
    with pytest.raises(KeyError, match="of the consumer"), endless(original) as loader:
        next(loader)
        raise KeyError("of the consumer")
    assert not loader_threads()


def test_the_end_of_the_order_closes(original):
    loader = endless(original, stop_step=2)
    assert len(list(loader)) == 2 and not loader_threads()


def test_close_does_not_wait_for_a_large_batch(original):
    """Slices that have not begun are not begun."""
    order = TrainOrder([200_000], 200_000, 0)
    order.batch = lambda *_: EvalOrder([SHARDS[0]], 1).batch(0, 0, 200_000)
    loader = Loader(original, order, image_size=8, transform=EvalTransform(), threads=1)
    reading = loader._producer._reader
    calls = []
    inner, reading._read_slice = reading._read_slice, lambda *rows: (time.sleep(0.01), calls.append(1), inner(*rows))[2]
    assert wait_until(lambda: len(calls) >= 2)
    loader.close()  # 6,250 slices would take more than a minute
    assert len(calls) < 1000


def test_closing_from_another_thread_releases_a_waiting_consumer(original):
    gate = threading.Event()

    class Slow(EvalTransform):
        def boxes(self, keys, heights, widths):
            gate.wait(30)
            return super().boxes(keys, heights, widths)

    loader = Loader(original, EvalOrder(SHARDS, 8), image_size=8, transform=Slow())
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


def test_a_slow_consumer_bounds_what_is_read_ahead(original):
    with endless(original, prefetch=3) as loader:
        reader = loader._producer._reader
        steps = []
        inner, reader.read = reader.read, lambda step: (steps.append(step), inner(step))[1]
        next(loader)
        time.sleep(0.4)
        assert max(steps) <= 4 + 1  # one taken, three waiting, one being put


def test_the_garbage_collector_may_run_in_a_loaders_own_thread(original):
    """A cycle with a loader in it, collected by one of its decoding threads: no thread waits for itself."""
    loader = endless(original)
    next(loader)
    pool, producer = loader._producer._reader._pool, loader._producer
    cycle = [loader]
    cycle.append(cycle)
    gc.disable()
    try:
        del loader, cycle
        pool.submit(gc.collect).result(timeout=10)
    finally:
        gc.enable()
    producer.join(10)
    assert not producer.is_alive()


def test_more_shards_in_a_batch_than_stay_open(original, monkeypatch):
    """They stay open as long as batches need them; and there are files enough for a batch of a large dataset."""
    monkeypatch.setattr("vitscale.data.loader._OPEN_SHARDS", 2)
    opened = []

    class Counted(ShardFile):
        def __init__(self, *args, **kwargs):
            opened.append(args[0])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("vitscale.data.loader.ShardFile", Counted)
    order = TrainOrder(SHARDS, 64, 0)
    with Loader(original, order, image_size=8, transform=TrainTransform(), stop_step=10) as loader:
        for _ in loader:
            pass
    assert len(opened) <= 6
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or soft >= 4096 or soft == hard


@pytest.mark.parametrize(
    "wrong", [{"rank": 2, "world": 2}, {"rank": -1}, {"world": 3}, {"threads": 0}, {"prefetch": 0}]
)
def test_impossible_settings(original, wrong):
    with pytest.raises(AssertionError):
        endless(original, **wrong)
