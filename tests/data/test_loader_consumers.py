"""Who takes batches from a loader: several threads, or a process that was forked with it."""

import subprocess
import sys
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


FORKING = """
import os, sys
from vitscale.data import Loader, TrainOrder, TrainTransform
from vitscale.shards import Manifest

manifest = Manifest.load(sys.argv[1])
order = TrainOrder([shard.num_selected for shard in manifest.shards], 8, 0)
with Loader(manifest, order, image_size=8, transform=TrainTransform(), stop_step=5) as loader:
    next(loader)
    child = os.fork()
    if child == 0:
        try:
            next(loader)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(*(batch.step for batch in loader))
"""


def test_a_forked_process_is_told_that_its_loader_stayed_behind(manifest):
    """Its threads did; without a word it would wait for ever. The process has no other threads than the loader's."""
    command = [sys.executable, "-c", FORKING, str(manifest.shard_path(0).parent)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    told, left = outcome.stdout.splitlines()
    assert "make another one in this process" in told and left == "1 2 3 4"
