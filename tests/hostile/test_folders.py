"""What strangers put into a run, a dataset, a cache or the temporary folder is not followed, believed or removed."""

import hashlib
import json
import os
import random
import stat
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint.toy_checkpoint import with_checksum
from hostile.strange_files import IRREGULAR, NO_HANG, PRECIOUS, ROOT, a_hole
from pydantic import ValidationError
from small_files import entry_of, files_in

from vitscale.about.studies.running import last_words
from vitscale.data.shards import ShardEntry, ShardFile
from vitscale.data.shards.cache import ShardCache
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.data.shards.manifest import Manifest
from vitscale.data.shards.verified import verify_once
from vitscale.data.shards.verify import verify
from vitscale.ground.errors import CheckpointError, DataError, RecipeError
from vitscale.ground.files.digests import file_digests
from vitscale.ground.files.machine_folder import MachineFolder, choose_code_folder, private_folder
from vitscale.runs.checkpoint import CheckpointIndex, CheckpointStore, Fragment, LocalDirectory, RemoteDirectory
from vitscale.runs.checkpoint_index import FileEntry, index_text, parse_index, read_index
from vitscale.runs.done import read_done
from vitscale.runs.names import step_folder

pytestmark = NO_HANG
DIGEST = hashlib.sha256(b"").hexdigest()


# ---- Digests and paths that files state ------------------------------------------------------------------------------

DIGESTS = ["../../victim", "A" * 64, DIGEST + "\n", DIGEST[1:], f"{DIGEST[:61]}/..", "٠" * 64, ""]
PATHS = ["../x", "/etc/passwd", "a/b", "a\\..\\b", "..", ".", "", "x\0"]


INDEX = CheckpointIndex(1, 1, {"w": [5]}, ["master"], 1, {}, {}, {}, files=[FileEntry("NAME", 8, DIGEST)])
WRONG_INDEXES = {
    "files.0.sha256": [{"files": [{"path": "NAME", "bytes": 8, "sha256": digest}]} for digest in DIGESTS],
    "files.0: ": [{"files": [{"path": path, "bytes": 8, "sha256": DIGEST}]} for path in PATHS],
    "shapes": [{"shapes": {"w": shape}} for shape in ([-1, -5], [2**60], [True])],
    "selection": [{"selection": {"best": [1]}}],
    "class_names": [{"data": {"class_names": names}} for names in (5, "ab", [1])],
    "kinds": [{"kinds": ["master", kind]} for kind in ("ema.../../x", "ema.\nERROR: b", "", "m" * 201)],
}


@pytest.mark.parametrize("field", WRONG_INDEXES)
def test_what_a_checkpoints_index_states_is_refused_by_its_field(field: str) -> None:
    right = json.loads(index_text(INDEX))
    assert parse_index(json.dumps(with_checksum(right)).encode(), "index.json") == INDEX
    for wrong in WRONG_INDEXES[field]:
        with pytest.raises(CheckpointError, match=field):
            parse_index(json.dumps(with_checksum(right | wrong)).encode(), "index.json")


ENTRY = {"path": "x", "samples": 1, "bytes": 1, "first_uid": 0, "sha256": DIGEST, "xxh3_128": "0" * 32}
WRONG_ENTRIES = [
    *({"sha256": digest} for digest in DIGESTS),
    *({"xxh3_128": name} for name in ("A" * 32, "0" * 31, "0" * 32 + "\n", "../" * 10 + "ab")),
    *({"bytes": 10**30}, {"first_uid": 2**63}),
]


def test_files_beside_a_manifest_are_named_relative_to_it_and_have_digests_and_sizes() -> None:
    assert ShardEntry.model_validate(ENTRY | {"path": "../other/x"}).path == "../other/x"  # as views have it
    wrongs = list(WRONG_ENTRIES)
    for path in ("/etc/passwd", "", "x\0"):
        listed = {"path": path, "sha256": DIGEST}
        adopted = {"image_field": "image", "label_field": None, "checksums": listed}
        wrongs += [{"path": path}, {"select": {"exclude": listed | {"count": 1}}}, {"adopted": adopted}]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            ShardEntry.model_validate(ENTRY | wrong)


# ---- Pieces of a checkpoint ------------------------------------------------------------------------------------------


def saved(directory: LocalDirectory | RemoteDirectory, *steps: int) -> CheckpointStore:
    import torch

    store = CheckpointStore(directory)
    for step in steps or (1,):
        fragment = Fragment("w", 0, {"master": torch.arange(5.0) + step})
        store.save(replace(INDEX, step=step, optimizer_steps=step, position=step, files=[]), [fragment])
    return store


PIECES = IRREGULAR | {"link": lambda path: path.symlink_to(path.parent / "aside")}
HINTS = IRREGULAR | {"hole": a_hole}


@pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)
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
    assert list(files_in(tmp_path).values()).count(PRECIOUS) == len(kept)
    assert store.steps() == [3] and not list(root.glob("step-00000001"))


@pytest.mark.parametrize("make", HINTS.values(), ids=HINTS)
def test_hints_in_a_run_directory_are_no_more_than_hints(make: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    make(tmp_path / "checkpoints" / "latest")
    make(tmp_path / "launch.log")
    assert saved(LocalDirectory(tmp_path / "checkpoints")).steps() == [1]
    assert last_words(tmp_path / "launch.log").strip("\0") == ""


# ---- Shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
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


@pytest.mark.parametrize("make", HINTS.values(), ids=HINTS)
def test_what_is_read_as_a_whole_is_a_regular_file(make: Callable[[Path], object], tmp_path: Path) -> None:
    for name in ("manifest.json", "index.json", "DONE"):
        make(tmp_path / name)
    with pytest.raises(DataError):
        Manifest.load(tmp_path)
    with pytest.raises(CheckpointError):
        read_index(tmp_path)
    assert read_done(tmp_path) is None


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
    before = files_in(tmp_path)
    with pytest.raises(RecipeError):
        MachineFolder(above, "ours")
    assert before.items() <= files_in(tmp_path).items()


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


@pytest.mark.parametrize("name", ["*/vit", "lr[12]", "lr?"])
def test_a_place_for_checkpoints_is_no_pattern(name: str, tmp_path: Path) -> None:
    """fsspec removes whatever a pattern matches: other people's."""
    root = f"memory://test-folders/{tmp_path.name}"
    others = [saved(RemoteDirectory(f"{root}/{one}", tmp_path / "cache")) for one in ("vit", "lr1", "lr2")]
    with pytest.raises(RecipeError):
        saved(RemoteDirectory(f"{root}/{name}", tmp_path / "cache"))
    assert [store.steps() for store in others] == [[1]] * 3


# ---- The cache of shards ---------------------------------------------------------------------------------------------


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
    shard, markers, entry = tmp_path / "x.beton", tmp_path / "verified", entry_of(bytes(1000))
    shard.write_bytes(bytes(1000))
    verify_once(shard, entry, markers)
    (book,) = markers.iterdir()
    book.write_text(book.read_text().replace(entry.xxh3_128, "0" * 32))
    lie = entry.model_copy(update={"xxh3_128": "0" * 32})
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


# Mode and group of a folder above, and who else can rename what is in it.
ABOVE = [*((mode, 4002, "nobody") for mode in (0o755, 0o1777)), (0o775, 0, "nobody"), (0o775, 4002, "group")]
ABOVE += [(0o777, 0, "all")]


@ROOT
@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_compiled_code_is_kept_where_no_other_user_can_write(
    put: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("VARIABLE", "")
    (tmp_path / "tmp").mkdir()
    chosen = []
    for _ in range(2):
        monkeypatch.delenv("VARIABLE", raising=False)
        choose_code_folder("VARIABLE")
        chosen.append(Path(os.environ["VARIABLE"]))
        if len(chosen) == 1:
            chosen[0].rmdir()
            put(chosen[0])
    found = chosen[1].lstat()
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    assert (chosen[1] == chosen[0]) == (put is PLACES["nothing"])


@ROOT
@pytest.mark.parametrize("mode, group, renamed_by", ABOVE)
def test_nothing_is_believed_below_a_folder_in_which_others_can_rename_it(
    mode: int, group: int, renamed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path / "above"
    (above / "ours").mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    os.chown(above, 0, group)
    (tmp_path / "link").symlink_to(above)
    for path in (above / "ours", above / "ours" / "new", tmp_path / "link" / "ours"):
        with pytest.raises(PermissionError) if renamed_by == "all" else nullcontext():
            assert private_folder(path) == path.resolve()
        monkeypatch.setattr(tempfile, "tempdir", str(path))
        monkeypatch.delenv("VARIABLE", raising=False)
        path.mkdir(exist_ok=True)
        choose_code_folder("VARIABLE")
        assert (os.environ["VARIABLE"] == f"{path.resolve()}/vitscale-variable-0") == (renamed_by == "nobody")
    monkeypatch.delenv("VARIABLE")
