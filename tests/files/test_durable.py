"""Files and folders are whole or absent whatever the disk answers; what killed processes left is removed; locks."""

import contextlib
import os
from functools import partial
from pathlib import Path

import pytest
from faulty_calls import run_with_fault
from processes import start_python
from small_files import files_in, write_files

from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.durable import durable_file, durable_folder, make_folder, new_folder, remove_leftovers
from vitscale.ground.files.locks import lock, locked, try_lock, unlock

FOLDER = """
import sys
from pathlib import Path
from vitscale.ground.errors import VitscaleError
from vitscale.ground.files.durable import new_folder
try:
    with new_folder(sys.argv[1]) as folder:
        (folder / "deep").mkdir()
        for i in range(3):
            (folder / "deep" / f"{i}").write_text("x")
except VitscaleError as error:
    print(type(error).__name__, error)
"""

FILE = """
import sys
from vitscale.ground.files.durable import durable_file
try:
    with durable_file(sys.argv[1], overwrite=sys.argv[2] == "over") as file:
        file.write(b"new")
except OSError as error:
    print(error.errno)
"""


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("fault", ["syncfs:error=EIO", "syncfs:error=ENOSPC", "fsync:error=EIO:when=1"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_not_on_the_disk_is_not_under_its_name(tmp_path, fault, exists):
    """The one `fsync` is the last step, that of the folder above."""
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    said = run_with_fault(fault, FOLDER, out)
    assert said.startswith(f"{DataError.__name__} OUT {out}: "), said
    assert names(tmp_path) in ([], ["out"])
    assert run_with_fault("", FOLDER, out) == ""
    assert names(out) == ["deep", "deep/0", "deep/1", "deep/2"]


def test_without_syncfs_each_file_is_flushed(tmp_path):
    assert run_with_fault("syncfs:error=ENOSYS", FOLDER, tmp_path / "out", log=tmp_path / "log") == ""
    flushed = [line.partition("<")[2].partition(">")[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert {path.rpartition("/out/")[2] for path in flushed if "/out/" in path} >= {"deep", "deep/0", "deep/2"}


@pytest.mark.parametrize(
    ("call", "over", "old", "kept"),
    [
        *((call, over, {}, {}) for call in (1, 2) for over in ("over", "new")),
        *((call, "over", {"file": b"old"}, {"file": kept}) for call, kept in ((1, b"old"), (2, b"new"))),
    ],
)
def test_a_file_that_is_not_on_the_disk_is_absent_or_the_old_or_the_new_one(tmp_path, call, over, old, kept):
    """The first `fsync` is that of the file, the second that of its folder."""
    write_files(tmp_path, *old.items())
    assert run_with_fault(f"fsync:error=EIO:when={call}", FILE, tmp_path / "file", over) == "5"
    assert files_in(tmp_path) == kept


def test_the_names_of_new_folders_are_flushed(tmp_path):
    assert run_with_fault("", FOLDER, tmp_path / "a" / "b" / "out", log=tmp_path / "log") == ""
    calls = (tmp_path / "log").read_text()
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        assert f"<{folder}>" in calls


def test_a_folder_cannot_be_made_where_a_file_is(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(RecipeError), new_folder(tmp_path / "file" / "out"):
        pass


HELD = """
import sys
from vitscale.ground.files.durable import durable_file, durable_folder
from pathlib import Path
with durable_folder(Path(sys.argv[1], "folder")) as folder, durable_file(Path(sys.argv[1], "file")) as file:
    (folder / "deep").mkdir()
    (folder / "deep" / "x").write_text("x")
    print("held", flush=True)
    sys.stdin.readline()
"""


SWEEP = """
import sys
from pathlib import Path
from vitscale.ground.files.durable import remove_leftovers
print("sweeping", flush=True)
while True:
    remove_leftovers(Path(sys.argv[1]))
"""


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    with start_python(HELD, tmp_path) as killed, start_python(HELD, tmp_path) as alive:
        assert killed.stdout.readline() == alive.stdout.readline() == "held\n"
        remove_leftovers(tmp_path)
        assert len(list(tmp_path.iterdir())) == 4
        killed.kill()
        killed.wait()
        for of_name, left in ((["other"], 4), (["file"], 3), ([], 2)):
            remove_leftovers(tmp_path, *of_name)
            assert len(list(tmp_path.iterdir())) == left
        alive.communicate("\n")
        assert alive.returncode == 0
    assert names(tmp_path) == ["file", "folder", "folder/deep", "folder/deep/x"]


@pytest.mark.parametrize("writer", ["folder", "file"])
def test_the_next_writer_removes_what_was_left_of_its_own_name(tmp_path, writer):
    with start_python(HELD, tmp_path) as killed:
        killed.stdout.readline()
        killed.kill()
    write = {"folder": durable_folder, "file": partial(durable_file, overwrite=False)}[writer]
    with write(tmp_path / writer):
        pass
    assert len(list(tmp_path.glob(f".{writer}.*"))) == 0 and len(list(tmp_path.glob(".*.part"))) == 1


def test_what_is_just_begun_is_not_taken_for_a_leftover(tmp_path):
    with contextlib.ExitStack() as sweeping:
        for _ in range(3):
            sweeper = sweeping.enter_context(start_python(SWEEP, tmp_path))
            sweeping.callback(sweeper.kill)
            assert sweeper.stdout.readline() == "sweeping\n"
        for _ in range(1000):  # without a second try, two in a hundred failed
            with pytest.raises(KeyError), durable_folder(tmp_path / "folder"):
                raise KeyError
            with pytest.raises(KeyError), durable_file(tmp_path / "file"):
                raise KeyError
    assert names(tmp_path) == []


def test_only_what_is_our_own_is_removed(tmp_path):
    """Links, pipes, other users' files, folders that no writer has made, and other names stay; and nothing waits."""
    part, outside = ".x.0123456{}.part", write_files(tmp_path / "outside", "lock", "precious")
    place = write_files(tmp_path / "place", part.format(3) + "/y", ".x.0123.part", part.format("G"))
    write_files(place, "x.01234567.part", ".x.01234567.part.bak")
    (place / part.format(0)).symlink_to(outside / "precious")
    (place / part.format(1)).symlink_to(outside)
    os.mkfifo(place / part.format(2))
    (place / part.format(4)).mkdir()
    (place / part.format(4) / "lock").symlink_to(outside / "lock")
    if os.geteuid() == 0:
        (place / part.format(5)).touch()
        os.chown(place / part.format(5), 4001, 4001)
    before = names(tmp_path)
    (place / ".x.89abcdef.part").touch()
    (place / ".x.fedcba98.part").mkdir()  # of a writer that was killed before it made a lock, or after it removed that
    remove_leftovers(place)
    remove_leftovers(tmp_path / "nowhere")
    assert names(tmp_path) == before


def test_a_link_in_what_was_left_is_removed_and_not_followed(tmp_path):
    write_files(tmp_path, "outside/precious", ".x.01234567.part/lock")
    (tmp_path / ".x.01234567.part" / "x").symlink_to(tmp_path / "outside")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["outside", "outside/precious"]


HOLD = """
import sys
from vitscale.ground.files.locks import lock
with open(sys.argv[1], "a+") as file:
    lock(file, shared=sys.argv[2] == "shared")
    print("held", flush=True)
    input()
"""


@pytest.mark.parametrize(("held", "may_share"), [("alone", False), ("shared", True)])
def test_a_lock_lasts_as_long_as_the_process_that_holds_it(tmp_path: Path, held: str, may_share: bool) -> None:
    path = tmp_path / "lock"
    with start_python(HOLD, path, held) as holder:
        assert holder.stdout.readline() == "held\n"
        with path.open("a+") as file:
            assert not try_lock(file)
            assert try_lock(file, shared=True) == may_share
        holder.kill()
    with path.open("a+") as file:
        assert try_lock(file)


def test_what_is_unlocked_can_be_locked(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as one, (tmp_path / "lock").open("a") as other:
        lock(one)
        assert not try_lock(other)
        unlock(one)
        assert try_lock(other)
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("a") as file:
        assert not try_lock(file)
