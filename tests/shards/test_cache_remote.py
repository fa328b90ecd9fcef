"""The cache of shards before a real S3 server, and before a proxy that spoils what passes between them."""

import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import start_python, wait_until
from s3_server import SECRET, behind_proxy
from small_files import entry_of
from test_cache import GENEROUS, holds, name_of, names

from vitscale.data.shards import ShardEntry
from vitscale.data.shards.cache import ShardCache
from vitscale.ground import storage
from vitscale.ground.errors import DataError, StorageError

PIECE = 64 << 10
SIZE = 12 * PIECE + 100


@pytest.fixture
def proxy(s3, monkeypatch):
    """Between this process and the server; pieces are small, so that a shard has several."""
    monkeypatch.setattr(storage, "_PIECE_BYTES", PIECE)
    yield from behind_proxy(s3, monkeypatch)


def put(s3, name: str, seed: int, size: int = SIZE) -> tuple[str, ShardEntry]:
    content = random.Random(seed).randbytes(size)
    s3.filesystem().pipe_file(f"bucket/{name}", content)
    return f"s3://bucket/{name}", entry_of(content)


def grows(folder: Path, at_least: int = 1) -> Path:
    """The `.part` of a shard of which so many bytes are here."""
    return wait_until(
        lambda: [path for path in folder.glob("*.part") if path.stat().st_blocks * 512 >= at_least], seconds=30
    )[0]


def test_a_shard_crosses_the_network_once_for_all_threads(s3, proxy, tmp_path):
    shards = [put(s3, f"once/{seed}", seed) for seed in range(3)]
    before = s3.mark()
    cache = ShardCache(tmp_path, GENEROUS)
    with ThreadPoolExecutor(4) as pool:
        for pinned in pool.map(lambda shard: cache.pin(*shard), [shards[i % 3] for i in range(12)]):
            pinned.release()
    asked = [access for access in s3.accesses(before) if access[0] == "GET"]
    assert len(asked) == 3 * 13  # one each piece
    assert names(tmp_path) == {name_of(entry) for _, entry in shards}


def test_connections_that_break_and_bits_that_turn_on_the_way_are_survived(s3, proxy, tmp_path):
    url, entry = put(s3, "broken", 1)
    proxy.after, proxy.cut, proxy.flip = PIECE // 2, 3, 0
    with ShardCache(tmp_path / "cut", GENEROUS).pin(url, entry) as pinned:
        assert proxy.cut == 0 and holds(pinned.path, entry)
    proxy.go_away()  # connections are kept, and each counts its own bytes
    proxy.come_back()
    proxy.flip = 1
    with ShardCache(tmp_path / "flipped", GENEROUS).pin(url, entry) as pinned:
        assert proxy.flip == 0 and holds(pinned.path, entry)


def test_a_server_that_is_away_for_seconds_is_waited_for(s3, proxy, tmp_path):
    url, entry = put(s3, "away", 1)
    proxy.rate = 200_000
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(ShardCache(tmp_path, GENEROUS).pin, url, entry)
        grows(tmp_path)
        proxy.go_away()
        proxy.rate = None
        time.sleep(1.5)
        proxy.come_back()
        with coming.result(timeout=60) as pinned:
            assert holds(pinned.path, entry)


@pytest.mark.parametrize("trouble", ["away", "silent", "trickling"])
def test_a_server_that_stays_in_trouble_is_a_storage_error(s3, proxy, tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.1, 0.1))
    monkeypatch.setattr(storage, "_TRY_SECONDS", 0.3)
    url, entry = put(s3, "trouble", 1)
    if trouble == "away":
        proxy.go_away()
    elif trouble == "silent":
        proxy.silent = True
    else:
        proxy.rate = 50_000
    with pytest.raises(StorageError, match="s3://bucket/trouble") as caught:
        ShardCache(tmp_path, GENEROUS).pin(url, entry)
    assert caught.value.exit_code == 75
    assert names(tmp_path) == set()
    for ask in (storage.read_bytes, storage.size_of) if trouble != "trickling" else ():  # which is enough for these
        with pytest.raises(StorageError, match=r"s3://bucket/x/manifest\.json"):
            ask("s3://bucket/x/manifest.json")


def test_a_transfer_from_a_silent_server_can_be_cancelled(s3, proxy, tmp_path):
    url, entry = put(s3, "cancelled", 1)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        proxy.rate = 100_000
        coming = pool.submit(ShardCache(tmp_path, GENEROUS).pin, url, entry, stop.is_set)
        grows(tmp_path)
        proxy.silent = True
        stop.set()
        with pytest.raises(CancelledError):
            coming.result(timeout=20)
    assert names(tmp_path) == set()


def test_what_the_source_no_longer_has_or_does_not_give_is_a_data_error(s3, proxy, tmp_path, monkeypatch):
    """Other content is in test_cache."""
    s3fs = pytest.importorskip("s3fs")
    cache = ShardCache(tmp_path, GENEROUS)
    url, entry = put(s3, "changed", 1)
    s3.filesystem().rm_file("bucket/changed")
    with pytest.raises(DataError, match="s3://bucket/changed"):
        cache.pin(url, entry)
    with pytest.raises(DataError, match="missing"):
        cache.pin("s3://no-such-bucket/changed", entry)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"s3://bucket/changed.*Forbidden"):
        cache.pin(url, entry)
    assert names(tmp_path) == set()


def test_an_object_that_is_replaced_or_deleted_while_it_is_read(s3, proxy, tmp_path, monkeypatch):
    monkeypatch.setattr("vitscale.ground.files.fetching.PAUSES", (0.0, 0.0))
    cache = ShardCache(tmp_path, GENEROUS)
    for change, message in (
        (lambda: put(s3, "while", 2), "3 transfers"),
        (lambda: s3.filesystem().rm_file("bucket/while"), "missing"),
    ):
        url, entry = put(s3, "while", 1)
        proxy.rate = 200_000
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(cache.pin, url, entry)
            grows(tmp_path)
            change()
            proxy.rate = None
            with pytest.raises(DataError, match=message):
                coming.result(timeout=60)
        assert names(tmp_path) == set()


_PROCESS = """
import sys
from pathlib import Path
from vitscale.ground import storage
from vitscale.data.shards import ShardEntry
from vitscale.data.shards.cache import ShardCache
storage._PIECE_BYTES = int(sys.argv[4])
ShardCache(Path(sys.argv[1]), 10**9).pin(sys.argv[2], ShardEntry.model_validate_json(sys.argv[3])).release()
"""


def test_when_the_process_that_fetches_is_killed_one_that_waits_takes_over(s3, proxy, tmp_path):
    url, entry = put(s3, "killed", 1)
    proxy.rate = 100_000
    arguments = tmp_path, url, entry.model_dump_json(), PIECE
    process = start_python(_PROCESS, *arguments)
    with ThreadPoolExecutor(1) as pool:
        part = grows(tmp_path, PIECE)
        waiting = pool.submit(ShardCache(tmp_path, GENEROUS).pin, url, entry)
        time.sleep(0.3)
        assert names(tmp_path) == {part.name} and part.stat().st_size == SIZE  # it counts in full
        process.kill()
        process.communicate()
        proxy.rate = None
        with waiting.result(timeout=60) as pinned:
            assert holds(pinned.path, entry) and names(tmp_path) == {name_of(entry)}
