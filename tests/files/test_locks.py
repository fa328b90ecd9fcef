"""The lock between real processes."""

from pathlib import Path

import pytest
from python_processes import start_python

from vitscale.ground.files.locks import lock, locked, try_lock, unlock

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
