"""Who takes batches from a loader: several threads, or a process that was forked with it."""

from concurrent.futures import ThreadPoolExecutor

from loaders import loader_of
from python_processes import run_python


def test_several_threads_get_each_batch_once(manifest):
    with loader_of(manifest, stop=200) as loader, ThreadPoolExecutor(4) as pool:
        taken = [pool.submit(lambda: [batch.position for batch in loader]) for _ in range(4)]
        steps = [step for future in taken for step in future.result(timeout=60)]
    assert sorted(steps) == list(range(200))


FORKING = """
import os, signal, sys, threading
from vitscale.data.loader import Loader
from vitscale.data.order import TrainOrder
from vitscale.data.augmentation import TrainTransform
from vitscale.data.shards import Manifest

FORKS, LOADERS = 40, 8
manifest = Manifest.load(sys.argv[1])
order = TrainOrder([shard.num_selected for shard in manifest.shards], 8, 0)

def open_loader(stop):
    return Loader(manifest, order, image_size=8, transform=TrainTransform(), stop_step=stop)

def forked(told):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # kills it where it hangs
        os._exit(told())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refusals(call):
    count = 0
    for loader in loaders:
        try:
            call(loader)
        except RuntimeError as error:
            count += "make another one in this process" in str(error)
    return count

with open_loader(5) as loader:
    loaders = [loader]
    next(loader)
    print(forked(lambda: refusals(next)), *(batch.position for batch in loader))

# Their threads hold one lock or another at most of these moments.
loaders = [open_loader(None) for _ in range(LOADERS)]
for loader in loaders:
    threading.Thread(target=lambda loader=loader: [None for _ in loader], daemon=True).start()
calls = [next, Loader.next_if_ready, Loader.close]
print(*(forked(lambda: refusals(calls[i % 3])) for i in range(FORKS)))
sys.stdout.flush()
os._exit(0)  # the threads are in the middle of it
"""


def test_a_forked_process_is_told_that_its_loader_stayed_behind(manifest):
    """Its threads did; without a word it would wait for ever."""
    first, many = run_python(FORKING, manifest.directory).splitlines()
    assert first == "1 1 2 3 4"
    assert [int(count) for count in many.split()] == [(8, 8, 0)[i % 3] for i in range(40)]
