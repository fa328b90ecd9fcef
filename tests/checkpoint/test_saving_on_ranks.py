"""Two ranks that save in the background, on disks that fill up, refuse and come back; and ranks that are killed."""

import random
import resource
import subprocess
import time
from pathlib import Path

import pytest
from saving_ranks import SCALE, Place, Rank, Ranks, newest, save_steps, save_until_an_error
from small_disk import small_disk as mounted
from toy_checkpoint import fragments, holds, index, unverified

from vitscale.ground.errors import CheckpointError
from vitscale.runs.checkpoint import CheckpointStore


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        yield ranks


def save_where_files_of_rank_1_end(this: Rank, place: Place, step: int) -> list[tuple[int, str | None]]:
    """What became of a step; no file of rank 1 grows beyond some kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if this.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        return save_steps(this, place, [step])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def only(steps: list[int]) -> set[str]:
    return {"latest", *(f"step-{step:08d}" for step in steps)}


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_what_two_ranks_saved_is_read_by_any_number(ranks, tmp_path):
    assert ranks.do(save_steps, Place(tmp_path), [1, 2, 3], 2)[:2] == [[(1, None), (2, None), (3, None)]] * 2
    assert names(tmp_path) == only([2, 3])
    for world in (1, 2, 3):
        assert ranks.do(newest, Place(tmp_path), world)[:world] == [(3, True, [])] * world


def test_damage_in_one_rank_s_file_is_known_to_all(ranks, tmp_path):
    ranks.do(save_steps, Place(tmp_path), [1, 2])
    file = tmp_path / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    found = ranks.do(newest, Place(tmp_path), 3)
    assert found[0] == found[1] == found[2] and found[0][:2] == (1, True)
    assert "rank-00001" in found[0][2][0] and found[0][2][1] == "falling back to the checkpoint of step 1"


def test_a_write_that_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    ranks.do(save_steps, Place(tmp_path), [1])
    for outcomes in ranks.do(save_where_files_of_rank_1_end, Place(tmp_path), 2)[:2]:
        [(step, error)] = outcomes
        assert step == 2 and "rank 1: OSError" in error
    assert names(tmp_path) == only([1]) and ranks.do(newest, Place(tmp_path), 3)[0] == (1, True, [])
    assert ranks.do(save_steps, Place(tmp_path), [3])[:2] == [[(3, None)]] * 2
    assert ranks.do(newest, Place(tmp_path), 2)[:2] == [(3, True, [])] * 2


def meet_an_error_that_cannot_travel(this: Rank, root: Path) -> str:
    class Local(Exception):
        """Not known to other processes."""

    store = CheckpointStore(root, rank=this.rank, gather=this.gather)
    pieces = fragments(2, rank=this.rank, ranks=3)
    if this.rank == 1:
        pieces = iter_that_raises(Local("what no library foresees"))
    try:
        store.save(index(2), pieces)
    except CheckpointError as error:
        return str(error)
    return ""


def iter_that_raises(error: Exception):
    raise error
    yield


def test_a_bug_on_one_rank_is_an_error_on_all(ranks, tmp_path):
    for message in ranks.do(meet_an_error_that_cannot_travel, tmp_path):
        assert message.endswith("earlier checkpoints are untouched. rank 1: Local: what no library foresees")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def test_a_full_disk_has_its_room_back_and_is_written_again(ranks, small_disk):
    root = small_disk / "checkpoints"
    outcomes = ranks.do(save_steps, Place(root), [1, 2, 3, 4, 5])
    assert outcomes[0] == outcomes[1]
    fits = [step for step, error in outcomes[0] if error is None]
    assert fits == [1, 2, 3] and all("No space left" in error for step, error in outcomes[0] if step > 3)
    assert names(root) == only(fits) and ranks.do(newest, Place(root), 2)[0] == (3, True, [])
    assert ranks.do(save_steps, Place(root), [6], 1)[0][0][1] is not None  # old ones go after new ones are there
    CheckpointStore(root).retain(1, None)
    assert ranks.do(save_steps, Place(root), [7], 1)[:2] == [[(7, None)]] * 2
    assert names(root) == only([7]) and ranks.do(newest, Place(root), 3)[0] == (7, True, [])


def test_a_disk_that_cannot_be_written_for_a_while(ranks, small_disk):
    root = small_disk / "checkpoints"
    ranks.do(save_steps, Place(root), [1])
    remount = ["mount", str(small_disk), "-o"]
    subprocess.run([*remount, "remount,ro"], check=True)
    for outcomes in ranks.do(save_steps, Place(root), [2])[:2]:
        assert "rank 0: OSError" in outcomes[0][1] and "Read-only" in outcomes[0][1]
    assert ranks.do(newest, Place(root), 2)[:2] == [(1, True, [])] * 2
    subprocess.run([*remount, "remount,rw"], check=True)
    assert ranks.do(save_steps, Place(root), [3])[:2] == [[(3, None)]] * 2
    assert names(root) == only([1, 3])


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_whole_checkpoints(tmp_path, kills):
    """Some rank dies at a random moment; the other one gets to know, and a new world goes on."""
    moments = random.Random(kills)
    for _ in range(kills):
        victim = moments.randrange(2)
        with Ranks(2) as ranks:
            before = max(CheckpointStore(tmp_path).steps(), default=0)
            assert ranks.do(save_steps, Place(tmp_path), [before + 1], 2)[:2] == [[(before + 1, None)]] * 2
            ranks.start(save_until_an_error, Place(tmp_path), before + 1)
            time.sleep(moments.random() * 0.1)
            ranks.kill(victim)
            errors = ranks.answer(1 - victim)
            assert errors and not isinstance(errors, Exception)
        steps = CheckpointStore(tmp_path).steps()
        assert 1 <= len(steps) <= 3
        for step in steps:
            CheckpointStore(tmp_path).open(step)
        assert holds(unverified(tmp_path / f"step-{steps[-1]:08d}"), steps[-1], SCALE)
