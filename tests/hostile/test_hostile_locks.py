"""Locks and journals: no link of a stranger is followed, other users are kept out, owner files stand in for locks."""

import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from hostile.strange_files import IRREGULAR, NO_HANG, PRECIOUS, ROOT, a_hole
from processes import start_python

from data_tools.machine import TaskRange, claimed
from data_tools.output import Output
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.files.locks import LockFile
from vitscale.recipe import load_recipe
from vitscale.runs.directory import claim, is_held, last_holder
from vitscale.runs.launches import Journal, read_launches
from vitscale.runs.metrics import MetricsLines, MetricsLog

pytestmark = NO_HANG


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


@ROOT
def test_another_user_can_neither_hold_a_lock_nor_tell_that_it_is_held() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, claim(run := Path(folder), load_recipe("b16_i1k")):
        run.chmod(0o755)
        os.seteuid(4001)
        try:
            with pytest.raises(PermissionError):
                (run / ".lock").open("rb")  # which flock needs
            assert is_held(run) is None
        finally:
            os.seteuid(0)
        assert is_held(run)


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


_NO_LOCKS = """
#define _GNU_SOURCE
#include <errno.h>
int flock(int file, int kind) { errno = ERROR; return -1; }
"""
_HOLD = """
import sys
from contextlib import ExitStack
from pathlib import Path
from data_tools.machine import ALL_TASKS, claimed
from vitscale.ground.errors import VitscaleError
from vitscale.ground.files.durable import new_folder
from vitscale.ground.files.machine_folder import MachineFolder
from vitscale.recipe import load_recipe
from vitscale.runs.directory import claim
take = {
    "run": lambda folder: claim(folder, load_recipe("b16_i1k")),
    "tasks": lambda folder: claimed(folder, ALL_TASKS),
    "machine folder": lambda folder: MachineFolder(folder, "x"),
    "folder": lambda folder: new_folder(folder / "out"),
}
with ExitStack() as held:
    for what, taken in take.items():
        try:
            held.enter_context(taken(Path(sys.argv[1], what)))
            print("held", flush=True)
        except VitscaleError as error:
            print(type(error).__name__, flush=True)
    sys.stdin.read()
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


OWNERS: dict[str, tuple[Callable[[Path], object], bool | None]] = {
    "now": (lambda path: path.write_text("other:1 5 5"), False),
    "a day ago": (lambda path: (path.write_text("other:1 5 5"), os.utime(path, (0, path.stat().st_mtime - 1e5))), True),
    "tomorrow": (lambda path: (path.write_text("other:1 5 5"), os.utime(path, (0, path.stat().st_mtime + 1e5))), True),
    "huge": (lambda path: (a_hole(path), os.utime(path, (0, 0))), True),
    "dangling": (lambda path: path.symlink_to("nothing"), True),
    **{name: (make, None) for name, make in IRREGULAR.items()},
}


@pytest.mark.parametrize("put, is_ours", OWNERS.values(), ids=OWNERS)
def test_an_owner_counts_while_it_is_renewed(
    put: Callable[[Path], object], is_ours: bool | None, tmp_path: Path
) -> None:
    """Of another machine, so that only its time tells; one of the future would count for ever."""
    put(tmp_path / "lock.owner")
    with LockFile(tmp_path / "lock") as file, nullcontext() if is_ours is not None else pytest.raises(OSError):
        assert file.own(shared=False) == is_ours


def test_an_owner_file_takes_the_place_of_a_lock(without_locks: dict[str, str], tmp_path: Path) -> None:
    folders = [tmp_path / what for what in ("run", "tasks", "machine folder", "folder")]
    for folder in folders:
        folder.mkdir()

    def start() -> "tuple[subprocess.Popen[str], list[str]]":
        process = start_python(_HOLD, tmp_path, env=without_locks)
        return process, [process.stdout.readline().strip() for _ in folders]

    first, told = start()
    assert told == ["held"] * 4
    second, told = start()
    assert told == ["RecipeError", "RecipeError", "held", "RecipeError"]  # processes share a machine folder
    second.communicate(timeout=20)
    assert (tmp_path / "machine folder" / "x" / "in-use").exists()
    first.kill()
    first.communicate()
    assert all(list(folder.rglob("*.owner*")) for folder in folders)  # of the killed one
    third, told = start()
    assert told == ["held"] * 4
    assert third.communicate(timeout=20)[1] == "" and third.returncode == 0
    assert not list(tmp_path.rglob("*.owner*"))
    assert [path.name for path in (tmp_path / "machine folder").iterdir()] == ["lock"]
