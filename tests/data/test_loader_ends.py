"""How processes end that have a loader in them, whatever that is at; and who takes batches: threads, forks."""

import ctypes
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loaders import loader_of
from picture_shards import write_pictures
from processes import run_python, start_python, wait_until

FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD = 0x4, 0x1, 0x10000, -100

_SCRIPT = """
import os, sys, threading, time
import vitscale.data.loader as module
from vitscale.data.augmentation import EvalTransform
from vitscale.data.loader import Loader
from vitscale.data.settings import Reading
from vitscale.data.order import TrainOrder
from vitscale.ground.errors import StorageError
from vitscale.data.shards import Manifest

module._CLOSE_SECONDS = 1.0
if __name__ == "__main__":
    manifest = Manifest.load(sys.argv[1])
    reading = Reading(stall_s=float(sys.argv[2]))
    order = TrainOrder([shard.num_selected for shard in manifest.shards], 16, 0)
    loader = Loader(manifest, order, image_size=8, transform=EvalTransform(), reading=reading)
    print("ready", flush=True)
{body}
"""

BODIES = {
    "errors, one that is told and one that nobody catches": """
    try:
        next(loader)
    except StorageError as error:
        print(error, flush=True)
    reading = Reading(stall_s=float(sys.argv[2]), verify_shards=False)
    next(Loader(manifest, order, image_size=8, transform=EvalTransform(), reading=reading))
""",
    "closed meanwhile, and never used": """
    never_used = Loader(manifest, order, image_size=8, transform=EvalTransform(), reading=reading)
    while "opening" not in loader._engine._activity.longest()[1]:
        time.sleep(0.01)
    loader.close()
    print("closed", flush=True)
""",
    "never ends": """
    for batch in loader:
        pass
""",
    "left open": """
    for _ in range(5):
        next(loader)
    print("done", flush=True)
""",
}


@pytest.fixture
def manifest(tmp_path):
    return write_pictures(tmp_path / "data", [20, 20])


def start(manifest, body, stall_s=600.0):
    return start_python(_SCRIPT.format(body=BODIES[body]), manifest.directory, stall_s)


def end(process):
    """Its exit status and what it printed, once it has ended by itself."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def stall(manifest):
    """Opening a shard does not return: the kernel asks this process for leave (fanotify), which never answers."""
    libc = ctypes.CDLL(None, use_errno=True)
    group = libc.fanotify_init(FAN_CLASS_CONTENT, os.O_RDONLY)
    if group < 0:
        pytest.skip("only root can stall a file")
    for index in (0, 1):
        name = os.fsencode(manifest.shard_path(index))
        if libc.fanotify_mark(group, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), AT_FDCWD, name):
            pytest.skip("this kernel cannot stall a file")
    yield
    os.close(group)


def test_a_read_that_stalls_is_told_and_the_process_ends(manifest, stall):
    """Whether the shards are to be compared first or not."""
    code, out, err = end(start(manifest, "errors, one that is told and one that nobody catches", stall_s=0.5))
    assert code == 1
    for said in (out, err.rpartition("StorageError")[2]):
        assert re.search("reading data is .*: opening", said) and str(manifest.directory / "shard-0000") in said
        assert re.search(r"has not returned for \d+ s \(data\.stall_s is 0\.5\)", said)


def test_a_process_ends_while_a_read_stalls(manifest, stall):
    code, out, err = end(start(manifest, "closed meanwhile, and never used", stall_s=0.5))
    assert code == 0 and "closed" in out and err == ""


def test_a_process_ends_with_a_loader_in_it(manifest):
    assert end(start(manifest, "left open")) == (0, "ready\ndone\n", "")


@pytest.mark.parametrize("stalled", [False, True])
def test_interrupted(request, manifest, stalled):
    """By Ctrl-C: one exception, and an end."""
    if stalled:
        request.getfixturevalue("stall")
    process = start(manifest, "never ends")
    assert process.stdout.readline() == "ready\n"
    threads = Path(f"/proc/{process.pid}/task")
    assert not threads.is_dir() or wait_until(lambda: len(list(threads.iterdir())) > 2)
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code in (-signal.SIGINT, 130) and err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1


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
