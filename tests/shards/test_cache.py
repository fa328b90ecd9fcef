"""The cache of shards: what it keeps, what it removes, and several processes at once. Sources that need no server."""

import errno
import fcntl
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import xxhash
from processes import start_python
from small_disk import small_disk
from small_files import entry_of

from vitscale.data.shards import ShardEntry
from vitscale.data.shards.cache import ShardCache
from vitscale.ground import storage
from vitscale.ground.errors import DataError, RecipeError

SIZE = 1_000_000
GENEROUS = 10**9


class Source:
    """Shards of random bytes at a URL of which this process, or any, can read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.entries: dict[str, ShardEntry] = {}

    def url(self, name: str) -> str:
        return f"{self._url}/{name}"

    def put(self, name: str, seed: int, size: int = SIZE) -> tuple[str, ShardEntry]:
        content = random.Random(seed).randbytes(size)
        self.write(name, content)
        return self.url(name), entry_of(content)

    def write(self, name: str, content: bytes) -> None:
        with fsspec.open(self.url(name), "wb", auto_mkdir=True) as file:
            file.write(content)

    def remove(self, name: str) -> None:
        storage.remove(self.url(name))


def holds(path: Path, entry: ShardEntry) -> bool:
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) == entry.xxh3_128


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def name_of(entry: ShardEntry) -> str:
    return f"{entry.xxh3_128}-{entry.bytes}.beton"


@pytest.fixture
def memory() -> Iterator[Source]:
    yield Source("memory://cache-test")
    fsspec.filesystem("memory").rm("/cache-test", recursive=True)


def test_a_shard_is_fetched_once_and_known_by_its_content(memory, tmp_path):
    cache = ShardCache(tmp_path / "cache", GENEROUS)
    url, entry = memory.put("a", seed=1)
    with cache.pin(url, entry) as pinned:
        assert holds(pinned.path, entry) and names(tmp_path / "cache") == {name_of(entry)}
    twin, same = memory.put("view/of/a", seed=1)
    memory.remove("a")
    for where in (url, twin):
        with ShardCache(tmp_path / "cache", GENEROUS).pin(where, same) as again:
            assert again.path == pinned.path
    _, other = memory.put("a", seed=2)  # another dataset in the place of the old one
    with cache.pin(url, other) as pinned:
        assert holds(pinned.path, other)
    assert names(tmp_path / "cache") == {name_of(entry), name_of(other)}


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 4000, 12_345])
def test_shards_of_any_number_of_pieces_arrive_whole(memory, tmp_path, monkeypatch, size):
    monkeypatch.setattr(storage, "_PIECE_BYTES", 1000)
    url, entry = memory.put("a", seed=1, size=size)
    with ShardCache(tmp_path, GENEROUS).pin(url, entry) as pinned:
        assert holds(pinned.path, entry)


def test_the_least_recently_used_make_room(memory, tmp_path):
    cache = ShardCache(tmp_path, 3 * SIZE)
    shards = [memory.put(f"{seed}", seed) for seed in range(4)]
    for index in (0, 1, 2, 0, 3):
        cache.pin(*shards[index]).release()
        time.sleep(0.01)  # file times have their own grain
    assert names(tmp_path) == {name_of(shards[index][1]) for index in (0, 2, 3)}


def test_what_is_pinned_stays_and_the_cache_grows_beyond_its_limit_with_one_warning(memory, tmp_path, caplog):
    cache = ShardCache(tmp_path, 2 * SIZE)
    shards = [memory.put(f"{seed}", seed) for seed in range(6)]
    pinned = [cache.pin(*shard) for shard in shards[:4]]
    assert all(holds(pin.path, entry) for pin, (_, entry) in zip(pinned, shards, strict=False))
    assert len(caplog.records) == 1 and "data.cache.limit_gb allows (0.002)" in caplog.text
    twice = cache.pin(*shards[0])
    pinned[0].release()
    pinned[0].release()
    pinned[1].release()
    with cache.pin(*shards[4]):
        assert names(tmp_path) == {name_of(shards[index][1]) for index in (0, 2, 3, 4)}
    for pin in (*pinned, twice):
        pin.release()
    with cache.pin(*shards[5]):
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * SIZE
    assert len(caplog.records) == 1


def test_foreign_files_are_neither_counted_nor_removed(memory, tmp_path):
    foreign = ["shard-00000.beton", "thesis.tex", "0" * 32 + ".beton", "." + "0" * 32 + "-5.beton", "x.part"]
    for name in foreign:
        (tmp_path / name).write_bytes(bytes(SIZE))
    (tmp_path / ("0" * 32 + "-7.beton")).mkdir()
    cache = ShardCache(tmp_path, SIZE)
    for seed in range(2):
        cache.pin(*memory.put("a", seed)).release()
    assert {path.name for path in tmp_path.iterdir() if path.name in foreign} == set(foreign)
    assert len(names(tmp_path)) == len(foreign) + 2


def test_rubbish_of_killed_processes_is_removed_and_what_grows_is_not(memory, tmp_path):
    url, entry = memory.put("a", seed=1)
    dead, alive = (tmp_path / f"{'0' * 32}-5.beton.{token * 8}.part" for token in "ab")
    same = tmp_path / f"{name_of(entry)}.{'c' * 8}.part"
    for path in (dead, alive, same):
        path.write_bytes(b"12345")
    with alive.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ShardCache(tmp_path, GENEROUS).pin(url, entry) as pinned:
            assert holds(pinned.path, entry) and names(tmp_path) == {name_of(entry), alive.name}


def test_a_file_that_is_removed_between_its_opening_and_its_lock_is_fetched_again(memory, tmp_path, monkeypatch):
    cache = ShardCache(tmp_path, GENEROUS)
    url, entry = memory.put("a", seed=1)
    cache.pin(url, entry).release()
    flock, late = fcntl.flock, [tmp_path / name_of(entry)]

    def evicted_first(file, operation):
        if late:
            late.pop().unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", evicted_first)
    with cache.pin(url, entry) as pinned:
        assert not late and holds(pinned.path, entry)


def test_what_grows_in_another_process_counts_as_what_is_there(memory, tmp_path):
    cache = ShardCache(tmp_path, 2 * SIZE)
    cache.pin(*memory.put("a", seed=1)).release()
    growing = tmp_path / f"{'0' * 32}-{SIZE}.beton.{'a' * 8}.part"
    growing.touch()
    os.truncate(growing, SIZE)
    with growing.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        url, entry = memory.put("b", seed=2)
        with cache.pin(url, entry):
            assert names(tmp_path) == {growing.name, name_of(entry)}


def test_a_cache_that_is_removed_meanwhile_begins_anew(memory, tmp_path):
    cache = ShardCache(tmp_path / "cache", GENEROUS)
    shard = memory.put("a", seed=1)
    with cache.pin(*shard) as old:
        shutil.rmtree(tmp_path / "cache")
        with cache.pin(*shard) as new:
            assert holds(new.path, shard[1])
        old.release()
        assert holds(new.path, shard[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source, content: source.remove("a"), "missing, but the manifest lists it"),
        (lambda source, content: source.write("a", content[:-1]), "999,999 bytes; the manifest says 1,000,000"),
        (lambda source, content: source.write("a", content + b"0"), "1,000,001 bytes; the manifest says 1,000,000"),
        (
            lambda source, content: source.write("a", content[:-1] + bytes([content[-1] ^ 1])),
            "in 3 transfers its xxh3_128 was not {expected}, as the manifest says, but {found}",
        ),
    ],
)
def test_what_the_manifest_does_not_list_is_an_error_and_leaves_nothing(memory, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr("vitscale.ground.files.fetching.PAUSES", (0.0, 0.0))
    url, entry = memory.put("a", seed=1)
    content = random.Random(1).randbytes(SIZE)
    found = xxhash.xxh3_128_hexdigest(content[:-1] + bytes([content[-1] ^ 1]))
    change(memory, content)
    with pytest.raises(DataError) as caught:
        ShardCache(tmp_path, GENEROUS).pin(url, entry)
    assert url in str(caught.value) and message.format(expected=entry.xxh3_128, found=found) in str(caught.value)
    assert names(tmp_path) == set()


def test_folders_and_limits_that_cannot_be_are_refused_by_name(memory, tmp_path, monkeypatch):
    url, entry = memory.put("a", seed=1)
    with pytest.raises(RecipeError, match=r"data\.cache\.limit_gb: 0\.000999999.*0\.001 GB"):
        ShardCache(tmp_path, SIZE - 1).pin(url, entry)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "manifest.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"data\.cache\.dir: .*dataset"):
        ShardCache(tmp_path / "dataset", GENEROUS)
    assert names(tmp_path / "dataset") == {"manifest.json"}
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"data\.cache\.dir: .*file/cache"):
        ShardCache(tmp_path / "file" / "cache", GENEROUS)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # no such file system is at hand
    with pytest.raises(RecipeError, match=r"\blocks\b"):
        ShardCache(tmp_path / "nfs", GENEROUS)


def test_a_full_disk_is_no_limit_to_begin_with_and_an_error_in_the_end(memory, tmp_path):
    with small_disk(tmp_path / "disk", "3500k") as disk:
        cache = ShardCache(disk / "cache", 10**12)
        for seed in range(5):
            url, entry = memory.put(str(seed), seed)
            with cache.pin(url, entry) as pinned:
                assert holds(pinned.path, entry)
        assert 1 <= len(names(disk / "cache")) <= 3
        pins = []
        with pytest.raises(RecipeError, match=r"data\.cache\.dir: .*No space left on device") as caught:
            for seed in range(5, 10):
                pins.append(cache.pin(*memory.put(str(seed), seed)))
        assert len(pins) == 3 and "data.cache.limit_gb (1000)" in str(caught.value)
        assert names(disk / "cache") == {pin.path.name for pin in pins}
        for pin in pins:
            pin.release()


def test_many_threads_on_few_shards(memory, tmp_path):
    """Each sees its shard whole for as long as it has it pinned, in a cache that holds less than half of them."""
    shards = [memory.put(f"{seed}", seed, size=50_000) for seed in range(9)]
    cache = ShardCache(tmp_path, 4 * 50_000)

    def use(seed: int) -> None:
        order = random.Random(seed)
        for url, entry in order.choices(shards, k=40):
            with cache.pin(url, entry) as pinned:
                assert holds(pinned.path, entry)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    kept = list(tmp_path.glob("*.beton"))
    assert len(kept) <= 4 and names(tmp_path) == {path.name for path in kept}


def test_waiting_for_another_process_can_be_cancelled(memory, tmp_path):
    url, entry = memory.put("a", seed=1)
    other = tmp_path / f"{name_of(entry)}.{'a' * 8}.part"
    other.write_bytes(b"")
    stop = threading.Event()
    cache = ShardCache(tmp_path, GENEROUS)
    with other.open("rb") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(cache.pin, url, entry, stop.is_set)
        time.sleep(0.3)
        assert not waiting.done()
        stop.set()
        with pytest.raises(CancelledError):
            waiting.result(timeout=20)


_PROCESS = """
import random, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[4], sys.argv[4] + "/.."]
from small_files import entry_of
from test_cache import Source, holds
from vitscale.data.shards.cache import ShardCache
import fsspec
cache, source, order = ShardCache(Path(sys.argv[1]), int(sys.argv[3])), Source(sys.argv[2]), random.Random()
shards = [(source.url(str(i)), entry_of(random.Random(i).randbytes(200_000))) for i in range(8)]
print("ready", flush=True)
sys.stdin.readline()
for url, entry in order.choices(shards, k=int(sys.argv[5])):
    with cache.pin(url, entry) as pinned:
        assert holds(pinned.path, entry)
        time.sleep(0.001)
        assert pinned.path.exists() and holds(pinned.path, entry)
"""


def test_processes_share_a_cache_that_is_too_small_also_when_some_are_killed(tmp_path):
    files = Source(f"file://{tmp_path}/source")
    for seed in range(8):
        files.put(str(seed), seed, size=200_000)
    cache = tmp_path / "cache"
    arguments = cache, files.url(""), 5 * 200_000, Path(__file__).parent
    processes = [start_python(_PROCESS, *arguments, rounds) for rounds in (150, 150, 100_000, 100_000)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes[2:]:
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if process in processes[2:] else 0), errors
        assert "Error" not in errors and "Traceback" not in errors
    url, entry = files.put("new", seed=99, size=200_000)
    with ShardCache(cache, 5 * 200_000).pin(url, entry):  # cleans up after those that were killed
        kept = list(cache.glob("*.beton"))
        assert len(kept) <= 5 and names(cache) == {path.name for path in kept}
