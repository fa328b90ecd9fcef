"""Who takes batches from a loader: several threads, or a process that was forked with it."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
from picture_shards import write_pictures

from vitscale.data import Loader, TrainOrder, TrainTransform

SHARDS = [20, 20]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("consumers") / "data", SHARDS)


def loader_of(manifest, stop):
    return Loader(manifest, TrainOrder(SHARDS, 8, 0), image_size=8, transform=TrainTransform(), stop_step=stop)


def test_several_threads_get_each_batch_once(manifest):
    with loader_of(manifest, 200) as loader, ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(lambda: [batch.step for batch in loader]) for _ in range(4)]
        steps = [step for future in taken for step in future.result(timeout=60)]
    assert sorted(steps) == list(range(200))


def _take_in_child(loader, pipe):
    try:
        next(loader)
    except RuntimeError as error:
        pipe.send(str(error))


def test_a_forked_process_is_told_that_its_loader_stayed_behind(manifest):
    """Its threads did; without a word it would wait for ever."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with loader_of(manifest, 5) as loader:
        next(loader)
        child = context.Process(target=_take_in_child, args=(loader, theirs))
        child.start()
        assert ours.poll(30) and "make another one in this process" in ours.recv()
        child.join(30)
        assert child.exitcode == 0
        assert [batch.step for batch in loader] == [1, 2, 3, 4]
