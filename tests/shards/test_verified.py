"""A local shard is compared with its manifest once a machine, and again when anything of it changes."""

import os
import random
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import start_python
from small_files import entry_of

from vitscale.data.shards import ShardEntry, verified
from vitscale.data.shards.verified import verify_once
from vitscale.ground.errors import DataError

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def shard(tmp_path) -> tuple[Path, ShardEntry]:
    path = tmp_path / "shard.beton"
    path.write_bytes(CONTENT)
    return path, entry_of(CONTENT)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Which files were read in full, from now on."""
    seen: list[str] = []
    digest = verified._digest

    def counted(file, cancelled):
        seen.append(Path(file.name).name)
        return digest(file, cancelled)

    monkeypatch.setattr(verified, "_digest", counted)
    return seen


def turned() -> bytes:
    return CONTENT[:1000] + bytes([CONTENT[1000] ^ 1]) + CONTENT[1001:]


def test_a_shard_is_read_once_as_long_as_it_stays_as_it_is(shard, reads, tmp_path):
    path, entry = shard
    for _ in range(3):
        verify_once(path, entry, tmp_path / "markers")
    assert reads == ["shard.beton"]
    os.utime(path)
    verify_once(path, entry, tmp_path / "markers")
    path.chmod(0o600)
    verify_once(path, entry, tmp_path / "markers")
    path.rename(tmp_path / "moved.beton")
    verify_once(tmp_path / "moved.beton", entry, tmp_path / "markers")
    (tmp_path / "link.beton").symlink_to(tmp_path / "moved.beton")
    verify_once(tmp_path / "link.beton", entry, tmp_path / "markers")
    assert len(reads) == 4


def test_a_flipped_bit_is_noticed_also_behind_the_same_size_and_date(shard, tmp_path):
    path, entry = shard
    verify_once(path, entry, tmp_path / "markers")
    before = path.stat()
    path.write_bytes(turned())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):  # what is remembered of a damaged shard is its own digest
        with pytest.raises(DataError, match="vitscale shards verify") as caught:
            verify_once(path, entry, tmp_path / "markers")
        for digest in (entry.xxh3_128, entry_of(turned()).xxh3_128):
            assert digest in str(caught.value)
        assert str(path) in str(caught.value)
    verify_once(path, entry_of(turned()), tmp_path / "markers")
    (tmp_path / "new.beton").write_bytes(CONTENT)
    os.utime(tmp_path / "new.beton", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "new.beton").replace(path)
    verify_once(path, entry, tmp_path / "markers")


def test_swapped_shards_are_noticed(shard, tmp_path):
    path, entry = shard
    other = tmp_path / "other.beton"
    other.write_bytes(turned())
    verify_once(path, entry, tmp_path / "markers")
    verify_once(other, entry_of(turned()), tmp_path / "markers")
    path.rename(tmp_path / "aside")
    other.rename(path)
    (tmp_path / "aside").rename(other)
    with pytest.raises(DataError, match="xxh3_128"):
        verify_once(path, entry, tmp_path / "markers")
    with pytest.raises(DataError, match="xxh3_128"):
        verify_once(other, entry_of(turned()), tmp_path / "markers")


def test_missing_cut_and_unreadable_shards_are_data_errors(shard, reads, tmp_path):
    path, entry = shard
    for change, named in (
        (lambda: os.truncate(path, 1000), "1,000 .*300,000 "),
        (path.unlink, r"shard\.beton"),
        (path.mkdir, r"shard\.beton"),
    ):
        change()
        with pytest.raises(DataError, match=named):
            verify_once(path, entry, tmp_path / "markers")
    assert reads == []


@pytest.mark.parametrize("rubbish", [b"half a line of a process that was kil", b"\xff\n\n" * 9, b""])
def test_rubbish_in_what_is_remembered_costs_time_only(shard, reads, tmp_path, rubbish):
    path, entry = shard
    verify_once(path, entry, tmp_path / "markers")
    (book,) = (tmp_path / "markers").iterdir()
    book.write_bytes(rubbish)
    for _ in range(3):
        verify_once(path, entry, tmp_path / "markers")
    assert 2 <= len(reads) <= 3


def test_markers_that_cannot_be_written_cost_time_and_one_warning(shard, reads, tmp_path, caplog):
    path, entry = shard
    (tmp_path / "file").write_text("")
    for _ in range(3):
        verify_once(path, entry, tmp_path / "file" / "markers")
    assert len(reads) == 3
    assert len(caplog.records) == 1 and "data.cache.dir sets another folder" in caplog.text
    (tmp_path / "damaged").write_bytes(turned())
    with pytest.raises(DataError):
        verify_once(tmp_path / "damaged", entry, tmp_path / "file" / "markers")


def test_many_shards_are_remembered_in_few_files(tmp_path):
    for index in range(600):
        (tmp_path / f"{index}").write_bytes(b"x")
        verify_once(tmp_path / f"{index}", entry_of(b"x"), tmp_path / "markers")
    books = list((tmp_path / "markers").iterdir())
    assert len(books) <= 256 and sum(path.stat().st_size for path in books) == 600 * 66


def test_of_several_threads_one_reads_and_the_others_wait(shard, tmp_path, monkeypatch):
    path, entry = shard
    reads, digest, reading = [], verified._digest, threading.Event()

    def slow(file, cancelled):
        reads.append(file.name)
        reading.wait(0.3)
        return digest(file, cancelled)

    monkeypatch.setattr(verified, "_digest", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: verify_once(path, entry, tmp_path / "markers"), range(4)))
    assert len(reads) == 1


_PROCESS = """
import sys
from pathlib import Path
from vitscale.data.shards import ShardEntry, verified
digest = verified._digest
def told(file, cancelled):
    print("reads", flush=True)
    sys.stdin.readline()
    return digest(file, cancelled)
verified._digest = told
print("ready", flush=True)
verified.verify_once(Path(sys.argv[1]), ShardEntry.model_validate_json(sys.argv[2]), Path(sys.argv[3]))
print("done", flush=True)
"""


def test_another_process_waits_for_one_that_reads_and_takes_over_when_that_is_killed(shard, tmp_path):
    path, entry = shard
    arguments = path, entry.model_dump_json(), tmp_path / "markers"
    first = start_python(_PROCESS, *arguments)
    assert [first.stdout.readline() for _ in range(2)] == ["ready\n", "reads\n"]
    second = start_python(_PROCESS, *arguments)
    assert second.stdout.readline() == "ready\n"
    assert select.select([second.stdout], [], [], 0.5)[0] == []
    first.kill()
    first.communicate(timeout=60)
    assert second.stdout.readline() == "reads\n"
    assert second.communicate("\n", timeout=60)[0] == "done\n"
    verify_once(path, entry, tmp_path / "markers")
