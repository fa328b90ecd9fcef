"""Saving in the background: what is saved is the state of the moment, nothing is lost, nobody hangs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from toy_checkpoint import fragments, holds, index, save, shapes

from vitscale.runs.checkpoint import BackgroundSaver, CheckpointStore


class Gate:
    """A `Gather` of one rank that waits until it is opened, and raises what it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: BaseException | None = None
        self.open.set()

    def __call__(self, value: object) -> list:
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return [value]


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def store(tmp_path, gate) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", gather=gate)


@pytest.fixture
def saver(store, gate):
    with BackgroundSaver(store, keep=2) as saver:
        yield saver
        gate.error = None
        gate.open.set()


def results(saver: BackgroundSaver) -> list[tuple[int, str | None]]:
    return [(outcome.step, outcome.error) for outcome in saver.outcomes()]


def test_training_goes_on_and_what_is_saved_is_the_state_of_the_moment(saver, store, gate):
    for step in (1, 2):  # the second one uses the memory of the first
        gate.open.clear()
        state = fragments(step)
        saver.save(index(step), state, best=None)
        assert not saver.wait(0.01) and saver.finished() == 0
        for fragment in state:
            for tensor in fragment.tensors.values():
                tensor.fill_(torch.nan)
        gate.open.set()
        assert saver.wait(60) and results(saver) == [(step, None)]
        assert holds(store.open(step), step)


def test_a_save_waits_for_the_one_before(saver, store, gate):
    gate.open.clear()
    saver.save(index(1), fragments(1), best=None)
    stalled = []
    other = threading.Thread(target=lambda: stalled.append(saver.save(index(2), fragments(2), best=None)))
    other.start()
    other.join(0.3)
    assert other.is_alive()
    gate.open.set()
    other.join(60)
    assert stalled
    saver.wait()
    assert results(saver) == [(1, None), (2, None)] and holds(store.open(1), 1) and holds(store.open(2), 2)


@pytest.mark.parametrize("background", [True, False])
def test_both_ways_do_the_same(background, tmp_path):
    store = CheckpointStore(tmp_path / "one")
    with BackgroundSaver(store, keep=1, keep_every=4, background=background) as saver:
        for step in range(1, 7):
            assert saver.save(index(step), fragments(step, cuts=(3, 20)), best=2) > 0
            saver.amend(step, {"best_step": 2})
    assert store.steps() == [2, 4, 6]
    assert [len(saver.outcomes(count)) for count in (0, 2, None)] == [0, 2, 4] and saver.finished() == 0
    assert store.open(6).index.selection == {"best_step": 2}
    plain = CheckpointStore(tmp_path / "plain")
    folder = save(plain, 6, cuts=(3, 20))
    file = "rank-00000.safetensors"
    assert (tmp_path / "one" / folder.name / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), SystemExit(3), ValueError("a bug")])
def test_no_error_is_lost_and_older_checkpoints_stay(saver, store, gate, error):
    for step in (1, 2):
        saver.save(index(step), fragments(step), best=None)
    saver.wait()
    gate.error = error
    saver.save(index(3), fragments(3), best=None)
    saver.amend(3, {"best": 1})  # of which nothing is said: there is nothing to amend
    saver.wait()
    gate.error = None
    assert store.steps() == [1, 2] and holds(store.newest(print), 2)
    saver.save(index(4), fragments(4), best=None)
    saver.amend(9, {"best": 1})
    saver.wait()
    failed, after, amended = saver.outcomes()[2:]
    assert failed.step == 3 and str(error) in failed.error
    assert (after.step, after.error) == (4, None) and store.steps() == [2, 4]
    assert amended.step == 9 and "step 9" in amended.error


def test_a_model_that_grows_gets_other_memory(saver, store):
    for step, scale in ((1, 1), (2, 50), (3, 1)):
        saver.save(index(step, scale), fragments(step, scale=scale), best=None)
        saver.wait()
        assert holds(store.open(step), step, scale) and shapes(scale) == store.open(step).index.shapes


def test_a_rank_that_owns_nothing_saves_too(saver, store):
    store.save(index(1), fragments(1))
    saver.save(index(2), [], best=None)
    saver.wait()
    assert results(saver) == [(2, None)]


HANGING = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from toy_checkpoint import fragments, index
from vitscale.runs.checkpoint import BackgroundSaver, CheckpointStore
def never(value):
    threading.Event().wait()
saver = BackgroundSaver(CheckpointStore(Path(sys.argv[1]), gather=never), keep=1)
saver.save(index(1), fragments(1), best=None)
assert not saver.wait(0.1)
"""


def test_a_process_may_end_while_a_save_hangs(tmp_path):
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", HANGING, str(tmp_path), here], timeout=60, check=True)
