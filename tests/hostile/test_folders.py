"""What strangers put into a run, a dataset, a cache or the temporary folder is not followed, believed or removed."""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from pydantic import ValidationError

import vitscale
from data_tools.locks import TaskRange, claimed
from data_tools.output import Output
from vitscale.checkpoint import CheckpointIndex, CheckpointStore, Fragment, LocalDirectory, RemoteDirectory
from vitscale.errors import CheckpointError, DataError, RecipeError
from vitscale.files.digests import file_digests
from vitscale.files.locks import LockFile, try_lock
from vitscale.files.machine_folder import MachineFolder
from vitscale.recipe import load_recipe
from vitscale.runs.checkpoint_index import FileEntry, index_text, parse_index
from vitscale.runs.directory import claim, is_held, last_holder
from vitscale.runs.launches import Journal, read_launches
from vitscale.runs.metrics import MetricsLines, MetricsLog
from vitscale.runs.names import step_folder
from vitscale.shards import ShardEntry, ShardFile
from vitscale.shards.cache import ShardCache
from vitscale.shards.generated import write_generated_dataset
from vitscale.shards.manifest import Manifest
from vitscale.shards.verified import verify_once
from vitscale.shards.verify import verify

DIGEST = hashlib.sha256(b"").hexdigest()
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can act for other users")
PRECIOUS = b"a model of last year"


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A pipe that is waited for is an error, not a test suite that never ends."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}
IRREGULARS = pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)


# ---- Digests and paths that files state ------------------------------------------------------------------------------

DIGESTS = ["../../victim", "A" * 64, DIGEST + "\n", DIGEST[1:], f"{DIGEST[:61]}/..", "٠" * 64, ""]
PATHS = ["../x", "/etc/passwd", "a/b", "a\\..\\b", "..", ".", "", "x\0"]


def index(*files: FileEntry) -> CheckpointIndex:
    return CheckpointIndex(1, 1, {"w": [5]}, ["master"], 1, {}, {}, {}, files=list(files))


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_digest_is_64_lower_case_hexadecimal_digits(digest: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        parse_index(index_text(index(FileEntry("rank-00000.safetensors", 8, digest))).encode(), "index.json")
    entry = {"path": "x.beton", "samples": 1, "bytes": 1, "first_uid": 0}
    with pytest.raises(ValidationError):
        ShardEntry.model_validate(entry | {"sha256": digest, "xxh3_128": "0" * 32})
    for name in ("A" * 32, "0" * 31, "0" * 32 + "\n", "../" * 10 + "ab"):
        with pytest.raises(ValidationError):
            ShardEntry.model_validate(entry | {"sha256": DIGEST, "xxh3_128": name})


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_a_checkpoints_index_states_is_a_name(path: str) -> None:
    text = json.loads(index_text(index(FileEntry("NAME", 8, DIGEST))))
    text["files"][0]["path"] = path
    del text["checksum"]
    canonical = json.dumps(text, sort_keys=True, separators=(",", ":"))
    text["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    with pytest.raises(CheckpointError):
        parse_index(json.dumps(text).encode(), "index.json")


@pytest.mark.parametrize("shape", [[-1, -5], [2**60], [True]])
def test_a_shape_that_cannot_be_is_refused_before_anything_is_allocated(shape: list[int]) -> None:
    with pytest.raises(CheckpointError):
        parse_index(index_text(replace(index(), shapes={"w": shape})).encode(), "index.json")


def test_files_beside_a_manifest_are_named_relative_to_it() -> None:
    entry = {"path": "x", "samples": 1, "bytes": 1, "first_uid": 0, "sha256": DIGEST, "xxh3_128": "0" * 32}
    assert ShardEntry.model_validate(entry | {"path": "../other/x"}).path == "../other/x"  # as views have it
    for path in ("/etc/passwd", "", "x\0"):
        listed = {"path": path, "sha256": DIGEST}
        adopted = {"image_field": "image", "label_field": None, "checksums": listed}
        for wrong in ({"path": path}, {"select": {"exclude": listed | {"count": 1}}}, {"adopted": adopted}):
            with pytest.raises(ValidationError):
                ShardEntry.model_validate(entry | wrong)
    for huge in ({"bytes": 10**30}, {"first_uid": 2**63}):
        with pytest.raises(ValidationError):
            ShardEntry.model_validate(entry | huge)


# ---- Pieces of a checkpoint ------------------------------------------------------------------------------------------


def saved(directory: LocalDirectory | RemoteDirectory, *steps: int) -> CheckpointStore:
    import torch

    store = CheckpointStore(directory)
    for step in steps or (1,):
        fragment = Fragment("w", 0, {"master": torch.arange(5.0) + step})
        store.save(replace(index(), step=step, optimizer_steps=step, position=step), [fragment])
    return store


def a_link(path: Path) -> None:
    moved = path.with_name("elsewhere.safetensors")
    moved = moved.parent.parent / moved.name
    (path.parent / "aside").replace(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("make", [*IRREGULAR.values(), a_link], ids=[*IRREGULAR, "link"])
def test_a_piece_of_a_checkpoint_is_a_regular_file_of_its_own(make: Callable[[Path], object], tmp_path: Path) -> None:
    store = saved(LocalDirectory(tmp_path / "checkpoints"))
    piece = tmp_path / "checkpoints" / step_folder(1) / "rank-00000.safetensors"
    piece.rename(piece.parent / "aside")
    make(piece)
    with pytest.raises(CheckpointError):
        store.open(1)


def remote(tmp_path: Path) -> RemoteDirectory:
    return RemoteDirectory(f"memory://test-folders/{tmp_path.name}", tmp_path / "cache")


def test_what_lies_in_the_place_of_a_fetched_piece_is_not_believed(tmp_path: Path) -> None:
    store = saved(remote(tmp_path))
    reader = store.open(1)
    (copy,) = (path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 64)
    right = copy.read_bytes()
    for wrong in (bytes(len(right)), right[:-1], b""):
        copy.write_bytes(wrong)
        assert reader.parameter("w").tolist() == [1, 2, 3, 4, 5] and copy.read_bytes() == right
    copy.unlink()
    (tmp_path / "private").write_bytes(right)
    copy.symlink_to(tmp_path / "private")
    assert reader.parameter("w").tolist() == [1, 2, 3, 4, 5] and not copy.is_symlink()


def test_saving_removes_no_files_but_those_of_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = saved(LocalDirectory(root), 1, 2)
    kept = [root / name for name in (".building-mine/x", ".deleting-notes/x", ".deleting-step-00000001/x")]
    kept += [root / step_folder(1) / "notes.txt", tmp_path / "victim" / "rank-00000.safetensors"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PRECIOUS)
    (root / ".building-step-00000009").symlink_to(tmp_path / "victim")
    store.retain(1, None)
    saved(LocalDirectory(root), 3)
    store.retain(1, None)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == PRECIOUS] != []
    everything = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert list(everything.values()).count(PRECIOUS) == len(kept)
    assert store.steps() == [3] and not list(root.glob("step-00000001"))


# ---- Shards ----------------------------------------------------------------------------------------------------------


@IRREGULARS
def test_a_shard_is_a_regular_file(make: Callable[[Path], object], tmp_path: Path) -> None:
    manifest = write_generated_dataset(tmp_path / "data", [3, 3])
    path = manifest.shard_path(0)
    path.unlink()
    make(path)
    with pytest.raises(DataError):
        ShardFile(path)
    with pytest.raises(OSError):
        file_digests(path)
    with pytest.raises(DataError):
        verify_once(path, manifest.shards[0], tmp_path / "verified")
    found = verify(manifest)
    assert {damage.path for damage in found.damage} == {path.name} and found.samples == 3


@IRREGULARS
def test_a_manifest_is_a_regular_file(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "manifest.json")
    with pytest.raises(DataError):
        Manifest.load(tmp_path)


# ---- The cache of checkpoints ----------------------------------------------------------------------------------------


def marked(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pth").write_bytes(PRECIOUS)
    return folder / "in-use"


LIES_THERE: dict[str, Callable[[Path, Path], object]] = {
    "folder": lambda above, _: marked(above / "mine"),
    "file": lambda above, _: (above / "model.pth").write_bytes(PRECIOUS),
    "marker that is a link": lambda above, other: marked(above / "mine").symlink_to(marked(other)),
    "marker that is a hard link": lambda above, other: marked(above / "mine").hardlink_to(other / "file"),
    "marker that is a pipe": lambda above, _: os.mkfifo(marked(above / "mine")),
    "marker that is a folder": lambda above, _: marked(above / "mine").mkdir(),
    "link to a marked folder": lambda above, other: (marked(other).touch(), (above / "mine").symlink_to(other)),
    "link in our place": lambda above, other: (marked(other).touch(), (above / "ours").symlink_to(other)),
}


@pytest.mark.parametrize("put", LIES_THERE.values(), ids=LIES_THERE)
def test_a_machine_folder_refuses_a_place_that_holds_anything_else(
    put: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    above, other = tmp_path / "vitscale-checkpoints", tmp_path / "other"
    for folder in (above, other):
        folder.mkdir()
    (other / "file").write_bytes(PRECIOUS)
    put(above, other)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RecipeError):
        MachineFolder(above, "ours")
    assert before == {path: path.read_bytes() for path in before}


def test_a_machine_folder_removes_what_killed_processes_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    marked(tmp_path / "left").touch()
    with MachineFolder(tmp_path, "ours") as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "ours"}
        assert stat.S_IMODE((folder.path / "in-use").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}


def test_folders_of_others_beside_remote_checkpoints_stay(tmp_path: Path) -> None:
    marked(tmp_path / "cache" / "checkpoints" / "vit-l-of-last-year")
    saved(remote(tmp_path)).open(1)
    assert (tmp_path / "cache" / "checkpoints" / "vit-l-of-last-year" / "model.pth").read_bytes() == PRECIOUS


# ---- The cache of shards ---------------------------------------------------------------------------------------------


def entry_of(content: bytes) -> ShardEntry:
    digests = {"sha256": hashlib.sha256(content).hexdigest(), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    return ShardEntry(path="x.beton", samples=1, bytes=len(content), first_uid=0, **digests)


@pytest.mark.parametrize("state", ["zeros", "cut", "link", "link to the same", "replaced", "written to"])
def test_a_file_in_the_cache_is_compared_with_its_name(state: str, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(100_000)
    source, entry = tmp_path / "source.beton", entry_of(content)
    source.write_bytes(content)
    cache = tmp_path / "cache" / "shards"
    cache.mkdir(parents=True)
    path = cache / f"{entry.xxh3_128}-{entry.bytes}.beton"
    if state in ("replaced", "written to"):
        ShardCache(cache, 10**9).pin(f"file://{source}", entry).release()
        before = path.stat()
    if state == "link":
        (tmp_path / "private").write_bytes(bytes(len(content)))
        path.symlink_to(tmp_path / "private")
    elif state == "link to the same":
        path.symlink_to(source)
    elif state == "replaced":
        (cache / "new").write_bytes(bytes(len(content)))
        os.utime(cache / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        (cache / "new").replace(path)
    else:
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(bytes(len(content) - (state == "cut")))
    with ShardCache(cache, 10**9).pin(f"file://{source}", entry) as pinned:
        assert pinned.path.read_bytes() == content and not pinned.path.is_symlink()
    assert source.read_bytes() == content


@ROOT
@pytest.mark.parametrize("spoil", [lambda path: os.chown(path, 4002, 4002), lambda path: path.chmod(0o777)])
def test_remembered_answers_that_others_could_have_written_are_not_believed(
    spoil: Callable[[Path], object], tmp_path: Path
) -> None:
    content = bytes(1000)
    shard, markers = tmp_path / "x.beton", tmp_path / "verified"
    shard.write_bytes(content)
    verify_once(shard, entry_of(content), markers)
    (book,) = markers.iterdir()
    book.write_text(book.read_text().replace(entry_of(content).xxh3_128, "0" * 32))
    lie = entry_of(content).model_copy(update={"xxh3_128": "0" * 32})
    verify_once(shard, lie, markers)  # as in a folder of our own
    spoil(markers)
    with pytest.raises(DataError):
        verify_once(shard, lie, markers)


# ---- Compiled code ---------------------------------------------------------------------------------------------------


PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "writable by all": lambda path: (path.mkdir(), path.chmod(0o777)),
    "sticky": lambda path: (path.mkdir(), path.chmod(0o1777)),
    "writable by a group": lambda path: (path.mkdir(), path.chmod(0o770)),
    "link": lambda path: path.symlink_to(path.parent),
    "file": Path.touch,
    "another user's": lambda path: (path.mkdir(mode=0o755), os.chown(path, 4002, 4002)),
}


@ROOT
@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_compiled_code_is_kept_where_no_other_user_can_write(
    put: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("VARIABLE", "")
    (tmp_path / "tmp").mkdir()
    chosen = []
    for usual in ("", "", str(tmp_path / "usual")):
        monkeypatch.delenv("VARIABLE", raising=False)
        vitscale.choose_code_folder("VARIABLE", usual)
        chosen.append(Path(os.environ["VARIABLE"]))
        if len(chosen) == 1:
            chosen[0].rmdir()
            put(chosen[0])
            put(tmp_path / "usual")
    for folder in chosen[1:]:
        found = folder.lstat()
        assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    is_free = put is PLACES["nothing"]
    assert (chosen[1] == chosen[0]) == is_free and (chosen[2] == tmp_path / "usual") == is_free


# ---- Locks and lines in a run directory ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "hard link", "dangling", "pipe", "folder"])
def test_a_lock_and_a_journal_are_not_written_through_a_link(kind: str, tmp_path: Path) -> None:
    thesis, run = tmp_path / "thesis.tex", tmp_path / "run"
    run.mkdir()
    thesis.write_bytes(PRECIOUS)
    if kind == "dangling":
        thesis.unlink()
    make = {"link": Path.symlink_to, "dangling": Path.symlink_to, "hard link": Path.hardlink_to}.get(kind)
    for name in (".lock", "launch.jsonl", "metrics.jsonl"):
        if make is not None:
            make(run / name, thesis)
        else:
            IRREGULAR[kind](run / name)
    with pytest.raises((OSError, RecipeError)):
        claim(run, load_recipe("b16_i1k")).close()
    with pytest.raises(OSError):
        LockFile(run / ".lock")
    said: list[str] = []
    journal = Journal(run / "launch.jsonl", said.append)
    journal.write("started")
    assert len(said) == 1
    if make is None:
        assert is_held(run) is None
        for read in (lambda: read_launches(run / "launch.jsonl"), MetricsLog(run / "metrics.jsonl").refresh):
            with pytest.raises(DataError):
                read()
    MetricsLines(run / "metrics.jsonl", 0).training(1, {"loss": 1.0})
    assert thesis.exists() == (kind != "dangling") and (kind == "dangling" or thesis.read_bytes() == PRECIOUS)


@pytest.mark.parametrize("text", ["a thesis\n", "one\ntwo", "x" * 300, "é"])
def test_a_lock_that_holds_anything_else_is_not_truncated(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text)
    claim(tmp_path, load_recipe("b16_i1k")).close()
    assert (tmp_path / ".lock").read_text() == text and last_holder(tmp_path) == ""


def test_a_lock_of_an_earlier_version_is_taken_over_and_becomes_private(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("a-node.of-a.cluster")
    (tmp_path / ".lock").chmod(0o644)
    with claim(tmp_path, load_recipe("b16_i1k")):
        assert is_held(tmp_path) and last_holder(tmp_path) == socket.gethostname()
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600 and is_held(tmp_path) is False


def _as_a_stranger(run: Path, answers: "multiprocessing.SimpleQueue[object]") -> None:
    os.setgid(4001)
    os.setuid(4001)
    try:
        with (run / ".lock").open("rb") as file:
            answers.put(try_lock(file))
    except PermissionError:
        answers.put("forbidden")
    answers.put(is_held(run))


@ROOT
def test_another_user_can_neither_hold_a_lock_nor_tell_that_it_is_held(tmp_path: Path) -> None:
    run = Path(tempfile.mkdtemp(dir="/tmp"))
    run.chmod(0o755)
    with claim(run, load_recipe("b16_i1k")):
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        process = context.Process(target=_as_a_stranger, args=(run, answers))
        process.start()
        process.join()
        assert (answers.get(), answers.get()) == ("forbidden", None)
    for path in run.iterdir():
        path.unlink()
    run.rmdir()


def test_a_conversion_refuses_links_in_its_output(tmp_path: Path) -> None:
    (tmp_path / "victim" / "listing").mkdir(parents=True)
    for name in (".vitscale-convert", "dedup"):
        out = tmp_path / f"out-{name}"
        out.mkdir()
        (out / name).symlink_to(tmp_path / "victim")
        with pytest.raises(RecipeError):
            Output.at(str(out), None).refuse_foreign([""])
    locks = tmp_path / "locks"
    locks.mkdir()
    (tmp_path / "thesis").write_bytes(PRECIOUS)
    (locks / "tasks-x-of-y.lock").touch()
    (locks / "tasks-0-of-0.lock").touch()
    (locks / "tasks-0-of-1.lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(OSError), claimed(locks, TaskRange()):
        pass
    assert (tmp_path / "thesis").read_bytes() == PRECIOUS


# ---- A file system without locks -------------------------------------------------------------------------------------

_NO_LOCKS = """
#define _GNU_SOURCE
#include <errno.h>
int flock(int file, int kind) { errno = ERROR; return -1; }
"""
_HOLD = """
import sys
from contextlib import contextmanager
from pathlib import Path
from data_tools.locks import ALL_TASKS, claimed
from vitscale.errors import VitscaleError
from vitscale.files.machine_folder import MachineFolder
from vitscale.recipe import load_recipe
from vitscale.runs.directory import claim, is_held
what, folder = sys.argv[1], Path(sys.argv[2])
take = {
    "run": lambda: claim(folder, load_recipe("b16_i1k")),
    "tasks": lambda: claimed(folder, ALL_TASKS),
    "machine folder": lambda: MachineFolder(folder, "x"),
}[what]
try:
    with take():
        print("held", is_held(folder), flush=True)
        sys.stdin.read()
except VitscaleError as error:
    print(type(error).__name__, flush=True)
"""


_SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module", params=["ENOLCK", pytest.param("ENOSYS", marks=_SLOW), pytest.param("EOPNOTSUPP", marks=_SLOW)]
)
def without_locks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes whose file systems have no locks."""
    folder = tmp_path_factory.mktemp("no-locks")
    (folder / "flock.c").write_text(_NO_LOCKS)
    build = ["gcc", "-shared", "-fPIC", f"-DERROR={request.param}", "-o", str(folder / "flock.so"), "flock.c"]
    if subprocess.run(build, cwd=folder, check=False).returncode:
        pytest.skip("no C compiler")
    return os.environ | {"LD_PRELOAD": str(folder / "flock.so")}


@pytest.mark.parametrize("what", ["run", "tasks", "machine folder"])
def test_an_owner_file_takes_the_place_of_a_lock(what: str, without_locks: dict[str, str], tmp_path: Path) -> None:
    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", _HOLD, what, str(tmp_path)]
        return subprocess.Popen(
            command, env=without_locks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def says(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().split(" ")[0].strip()

    first, second = start(), None
    assert says(first) == "held"
    second = start()
    shares = what == "machine folder"
    assert says(second) == ("held" if shares else "RecipeError")
    second.communicate(timeout=20)
    assert not shares or (tmp_path / "x" / "in-use").exists()
    first.kill()
    first.communicate()
    assert list(tmp_path.rglob("*.owner*"))  # of the killed one
    third = start()
    assert says(third) == "held"
    assert third.communicate(timeout=20)[1] == "" and third.returncode == 0
    assert not list(tmp_path.rglob("*.owner*"))
    if shares:
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
