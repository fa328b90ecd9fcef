"""Batches on their way to the device: none changes, whatever the consumer does with those it had."""

import os
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from loaders import loader_of, read

from vitscale.data.loader import on_device
from vitscale.data.shards import Manifest

SHARDS, STEPS = [40, 33, 7], 60
LARGE = {"batch": 20, "side": 224, "threads": 2, "prefetch": 2}  # batches of 3 MB, so that a copy takes its time
PATTERNS = [(True,), (False,), (True, False), (False, False, True), (True, True, True, False), (False, True, True)]


def check(folder: str, device: torch.device) -> int:
    """How many batches arrived as they were read, on a busy device: a batch's memory would be used again before the
    work on it has begun if nobody saw to it. Some batches are kept, of others only what was computed."""
    manifest = Manifest.load(folder)
    expected = read(manifest, stop=STEPS, **LARGE)
    compared = 0
    for pattern in PATTERNS:
        kept, derived = [], []
        with loader_of(manifest, stop=STEPS, pinned=device.type == "cuda", **LARGE) as loader:
            for batch, keeps in zip(on_device(loader, device), cycle(pattern), strict=False):
                assert batch.images.device.type == device.type
                if device.type == "cuda":
                    torch.cuda._sleep(5_000_000)  # cycles of the device, a few milliseconds
                kept.append(batch if keeps else None)
                derived.append((batch.images.clone(), batch.keys.clone()))
        for before, batch, (images, keys) in zip(expected, kept, derived, strict=True):
            assert torch.equal(images.cpu(), before.images) and torch.equal(keys.cpu(), before.keys)
            compared += 1
            if batch is not None:
                assert torch.equal(batch.images.cpu(), before.images) and torch.equal(batch.keys.cpu(), before.keys)
                for name in ("labels", "uids", "mask"):
                    assert torch.equal(getattr(batch, name), getattr(before, name))
                assert (batch.position, batch.epoch) == (before.position, before.epoch)
    return compared


def test_on_a_cpu_batches_are_handed_on_as_they_are(manifest):
    batches = read(manifest, stop=5)
    handed_on = list(on_device(iter(batches), torch.device("cpu")))
    assert len(handed_on) == 5 and all(a is b for a, b in zip(handed_on, batches, strict=True))
    with loader_of(manifest) as loader:
        moving = on_device(loader, torch.device("cpu"))
        assert [batch.position for batch in islice(moving, 3)] == [0, 1, 2]
        assert next(loader).position == 3  # nothing was taken ahead


@pytest.mark.gpu
def test_on_a_cuda_device_every_batch_arrives_as_it_was_read(manifest):
    """In a process of its own, since this one shall see no such device."""
    if torch.version.cuda is None and torch.version.hip is None:
        pytest.skip("this torch knows no CUDA devices")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    here = Path(__file__).resolve().parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), *sys.path])
    command = [sys.executable, __file__, str(manifest.directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if ended.returncode == 77:
        pytest.skip("no CUDA device here")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(STEPS * len(PATTERNS))] * 2


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(77)
    cuda = torch.device("cuda", 0)
    print(check(sys.argv[1], cuda))
    with torch.cuda.stream(torch.cuda.Stream(cuda)):  # a consumer that does not work on the default stream
        print(check(sys.argv[1], cuda))
