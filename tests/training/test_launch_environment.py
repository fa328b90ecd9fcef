"""Who we are among the ranks, and what stops us before there are any."""

import os
import time

import pytest

from vitscale.errors import RecipeError
from vitscale.training import distributed

VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_launcher_s_environment_is_taken(environment):
    for name, value in VARIABLES.items():
        environment.setenv(name, value)
    assert distributed.read_environment() == (1, 4, 1)


def test_without_a_launcher_there_is_one_rank(environment):
    for name in VARIABLES:
        environment.setenv(name, "")  # so that what is set here is undone
        environment.delenv(name)
    assert distributed.read_environment() == (0, 1, 0)
    assert int(os.environ["MASTER_PORT"]) > 0
    for name in VARIABLES:
        os.environ.pop(name)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(environment, missing):
    for name, value in VARIABLES.items():
        if name != missing:
            environment.setenv(name, value)
    with pytest.raises(RecipeError, match=f"half set.*without {missing}"):
        distributed.read_environment()


def test_values_that_are_no_numbers_are_shown(environment):
    for name, value in VARIABLES.items():
        environment.setenv(name, value)
    environment.setenv("RANK", "one")
    with pytest.raises(RecipeError, match="'RANK': 'one'"):
        distributed.read_environment()


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "99999"}, {"LOCAL_RANK": "-1"}])
def test_an_impossible_environment_is_shown(environment, wrong):
    for name, value in (VARIABLES | wrong).items():
        environment.setenv(name, value)
    with pytest.raises(RecipeError, match="impossible"):
        distributed.read_environment()


def test_a_stale_build_lock_is_named_and_a_fresh_one_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert distributed.stale_build_locks() == []
    old = time.time() - 7200
    os.utime(lock, (old, old))
    assert distributed.stale_build_locks() == [lock]
