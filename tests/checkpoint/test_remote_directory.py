"""Checkpoints on a real S3 server: whole or absent, verified on arrival, with a network and a server that fail."""

import random
import time
from pathlib import Path

import pytest
from s3_server import SECRET, S3Server, behind_proxy
from saving_ranks import CUTS, SCALE, Place, Ranks, save_steps, save_until_an_error
from saving_ranks import newest as newest_on
from small_disk import small_disk
from toy_checkpoint import fragments, holds, index

from vitscale.ground import storage
from vitscale.ground.errors import CheckpointError, StorageError
from vitscale.runs.checkpoint import BackgroundSaver, CheckpointStore, RemoteDirectory


@pytest.fixture
def proxy(s3, monkeypatch):
    """Between this process and the server; what fails for good does so soon."""
    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.1, 0.1))
    monkeypatch.setattr(storage, "_TRY_SECONDS", 5.0)
    yield from behind_proxy(s3, monkeypatch)


@pytest.fixture
def store(proxy, tmp_path) -> CheckpointStore:
    """An empty directory for each test."""
    return CheckpointStore(RemoteDirectory(f"s3://bucket/{tmp_path.name}/run", tmp_path / "cache"))


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(index(step, SCALE), fragments(step, CUTS, scale=SCALE))


def newest(store: CheckpointStore) -> tuple[int, list[str]]:
    """(step, what was reported) of the newest checkpoint, which holds what was saved."""
    said: list[str] = []
    reader = store.newest(said.append)
    assert reader is not None and holds(reader, reader.index.step, SCALE)
    return reader.index.step, said


def objects(s3: S3Server, store: CheckpointStore) -> set[str]:
    """Names of what is there, below the directory."""
    root = store.root.removeprefix("s3://")
    return {name.removeprefix(f"{root}/") for name in s3.filesystem().find(root)}


def whole(*steps: int) -> set[str]:
    return {f"step-{step:08d}/{name}" for step in steps for name in ("index.json", "rank-00000.safetensors")}


def copies(tmp_path: Path) -> set[str]:
    """What is left on this machine."""
    return {path.name for path in (tmp_path / "cache" / "vitscale-checkpoints").rglob("*")}


def test_the_index_is_put_last_and_nothing_is_left_on_this_machine(s3, store, tmp_path):
    before = s3.mark()
    save(store, 1, 2)
    names = [name.rpartition("run/")[2] for name in s3.created(before)]
    assert names == [
        f"step-0000000{step}/{name}" for step in (1, 2) for name in ("rank-00000.safetensors", "index.json")
    ]
    assert copies(tmp_path) == {"lock"} and newest(store) == (2, []) and copies(tmp_path) == {"lock"}
    reader = store.open(1)
    assert holds(reader, 1, SCALE) and len(copies(tmp_path)) > 1
    del reader
    assert copies(tmp_path) == {"lock"}


def test_what_is_not_needed_any_more_is_removed(s3, store):
    for step in range(1, 9):
        save(store, step)
        store.amend(step, {"best_step": 1})
        store.retain(2, 1, 3)
    assert store.steps() == [1, 3, 6, 7, 8] and objects(s3, store) == whole(1, 3, 6, 7, 8)
    assert store.open(6).index.selection == {"best_step": 1} and newest(store) == (8, [])


def test_without_an_index_there_is_no_checkpoint(s3, store):
    save(store, 1, 2)
    s3.filesystem().rm_file(f"{store.root}/step-00000002/index.json")
    assert store.steps() == [1] and newest(store) == (1, [])
    save(store, 3)
    assert objects(s3, store) == whole(1, 3)
    empty = CheckpointStore(RemoteDirectory(f"{store.root}-of-others", Path("/nowhere")))
    assert empty.steps() == [] and empty.newest(print) is None


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "index.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_damage_is_told_and_the_checkpoint_before_is_used(s3, store, tmp_path, file, how, monkeypatch):
    monkeypatch.setattr("vitscale.ground.files.fetching.PAUSES", (0.0, 0.0))
    save(store, 1, 2)
    fs, path = s3.filesystem(), f"{store.root}/step-00000002/{file}"
    content = bytearray(fs.cat_file(path))
    content[len(content) // 2] ^= 1
    if how == "missing":
        fs.rm_file(path)
    else:
        fs.pipe_file(path, bytes(content) if how == "flipped" else bytes(content[:-7]))
    step, said = newest(store)
    assert step == 1 and copies(tmp_path) == {"lock"}
    if (file, how) == ("index.json", "missing"):
        return  # there is no such checkpoint
    assert "step 2" in said[0] and f"{store.root}/step-00000002/{file}" in said[0] and "step 1" in said[1]
    with pytest.raises(CheckpointError, match=file):
        store.open(2)


def test_what_was_passed_over_is_no_checkpoint_any_more_but_stays(s3, store):
    save(store, 1, 5)
    s3.filesystem().pipe_file(f"{store.root}/step-00000005/rank-00000.safetensors", b"something else")
    assert newest(store)[0] == 1
    save(store, 3, 4)
    assert store.steps() == [1, 3, 4] and newest(store) == (4, [])
    aside = {"step-00000005/unusable-index.json", "step-00000005/rank-00000.safetensors"}
    assert objects(s3, store) == whole(1, 3, 4) | aside
    save(store, 5)
    assert objects(s3, store) == whole(1, 3, 4, 5) and newest(store) == (5, [])


def test_bits_that_turn_connections_that_break_and_slow_ones_are_survived(store, proxy, monkeypatch):
    monkeypatch.setattr("vitscale.ground.files.fetching.PAUSES", (0.1, 0.1))

    def connect_anew() -> None:
        proxy.go_away()  # connections are kept, and each counts its own bytes
        proxy.come_back()

    proxy.after, proxy.cut = 0, 2
    save(store, 1)
    assert proxy.cut == 0
    for proxy.after in (20_000, 200_000):
        connect_anew()
        proxy.flip = 1
        assert newest(store) == (1, []) and proxy.flip == 0
    connect_anew()
    proxy.after, proxy.cut = 100_000, 2
    assert newest(store) == (1, []) and proxy.cut == 0
    proxy.rate = 500_000
    assert newest(store) == (1, [])


@pytest.mark.parametrize("trouble", ["away", "silent"])
def test_a_server_in_trouble_is_waited_for_but_not_for_ever(s3, store, proxy, tmp_path, trouble, monkeypatch):
    """No older checkpoint is used because the network is away, none is lost, and a save is possible afterwards."""
    save(store, 1, 2)
    monkeypatch.setattr(storage, "_TRY_SECONDS", 0.3)  # in trouble alone: a busy machine may take longer
    if trouble == "away":
        proxy.go_away()
    else:
        proxy.silent = True
    with pytest.raises(StorageError) as caught:
        store.newest(print)
    assert caught.value.is_on_all_ranks
    with BackgroundSaver(store, keep=1) as saver:
        saver.save(index(3, SCALE), fragments(3, CUTS, scale=SCALE), best=None)
        saver.wait()
        assert "step 3" in saver.outcomes()[0].error
        assert copies(tmp_path) == {"lock"} and objects(s3, store) == whole(1, 2)
        monkeypatch.setattr(storage, "_TRY_SECONDS", 5.0)
        if trouble == "away":
            proxy.come_back()
        proxy.silent = False
        assert newest(store) == (2, [])
        saver.save(index(4, SCALE), fragments(4, CUTS, scale=SCALE), best=None)
        saver.wait()
        assert saver.outcomes()[0].error is None
    assert newest(store) == (4, []) and objects(s3, store) == whole(4)


def test_a_server_that_goes_away_in_the_middle_of_a_save(s3, store, proxy, monkeypatch):
    """The file of the rank has arrived, the index does not; nobody takes what is there for a checkpoint."""
    save(store, 1)
    finish = store.directory.finish

    def finish_without_a_server(index):
        proxy.go_away()
        finish(index)

    with monkeypatch.context() as patch:
        patch.setattr(store.directory, "finish", finish_without_a_server)
        with pytest.raises(StorageError, match="step 2"):
            save(store, 2)
    proxy.come_back()
    assert objects(s3, store) == whole(1) | {"step-00000002/rank-00000.safetensors"}
    assert store.steps() == [1] and newest(store) == (1, [])
    save(store, 3)
    assert objects(s3, store) == whole(1, 3)


def test_a_secret_that_is_wrong_is_no_damage(s3, store, monkeypatch):
    save(store, 1)
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"rank 0: PermissionError"):
        store.newest(print)
    with pytest.raises(CheckpointError, match=r"step 2.* PermissionError"):
        save(store, 2)


def test_copies_that_find_no_room_here_are_no_damage_there(store, tmp_path):
    save(store, 1)
    with small_disk(tmp_path / "disk", "128k") as disk:
        small = CheckpointStore(RemoteDirectory(store.root, disk))
        with pytest.raises(CheckpointError, match=r"step 1.*rank 0: OSError: .*No space left"):
            small.newest(print)
        with pytest.raises(CheckpointError, match=r"step 2.*No space left"):
            save(small, 2)
    assert newest(store) == (1, [])


def test_what_two_ranks_saved_is_read_by_any_number_and_fetched_once(s3, store, tmp_path):
    place = Place(store.root, tmp_path / "cache", s3.environment)
    with Ranks(3) as ranks:
        assert ranks.do(save_steps, place, [1, 2])[:2] == [[(1, None), (2, None)]] * 2
        for world in (1, 2, 3):
            before = s3.mark()
            assert ranks.do(newest_on, place, world)[:world] == [(2, True, [])] * world
            asked = [name for verb, name in s3.accesses(before) if verb == "GET" and name.endswith("safetensors")]
            assert len(asked) == 2
            assert copies(tmp_path) == {"lock"}


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_rank_killed_in_the_middle_of_an_upload_leaves_whole_checkpoints(s3, store, tmp_path, kills):
    place = Place(store.root, tmp_path / "cache", s3.environment)
    moments = random.Random(kills)
    for _ in range(kills):
        with Ranks(2) as ranks:
            before = max(store.steps(), default=0)
            assert ranks.do(save_steps, place, [before + 1]) == [[(before + 1, None)]] * 2
            ranks.start(save_until_an_error, place, before + 1)
            time.sleep(moments.random() * 0.5)
            ranks.kill(moments.randrange(2))
        step, said = newest(store)
        assert step > before and said == []
    assert copies(tmp_path) == {"lock"}  # of the killed ones too
