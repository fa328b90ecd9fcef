"""What the loader hands over is not overwritten while anybody holds it, and its memory is used again."""

import gc

import numpy as np
import pytest
import torch
from leaks import resident_bytes
from loaders import loader_of

from vitscale.data.batch_reader import Buffers

pytestmark = pytest.mark.usefixtures("nothing_stays")


KEPT = {
    "a batch": lambda batch: batch,
    "a tensor": lambda batch: batch.images,
    "a slice": lambda batch: batch.images[3:5],
    "a pixel": lambda batch: batch.images[7, 2, 2],
    "another shape": lambda batch: batch.images.permute(0, 3, 1, 2).flatten(2),
    "an array": lambda batch: batch.images.numpy(),
    "a slice of an array": lambda batch: batch.images.numpy()[3:5][1],
    "an array of a slice": lambda batch: batch.images[2:][1:].numpy()[2:],
    "a tensor of an array": lambda batch: torch.from_numpy(batch.images.numpy()[4:]),
    "another type": lambda batch: batch.images.view(torch.int8),
    "dlpack": lambda batch: torch.from_dlpack(batch.images[1:]),
    "a buffer": lambda batch: memoryview(batch.images.numpy()),
    "the rest": lambda batch: (batch.labels[2:], batch.uids.numpy(), batch.keys[1], batch.mask),
}
IN_EVERY_RUN = {"a slice of an array", "dlpack", "the rest"}  # `make test-all` takes them all


def copies_of(kept):
    parts = kept if isinstance(kept, tuple) else [getattr(kept, "images", kept)]
    return [np.array(part.numpy() if isinstance(part, torch.Tensor) else part) for part in parts]


@pytest.mark.parametrize(
    "kind", [kind if kind in IN_EVERY_RUN else pytest.param(kind, marks=pytest.mark.slow) for kind in KEPT]
)
def test_nothing_is_overwritten_while_anything_of_it_is_seen(manifest, kind):
    with loader_of(manifest, prefetch=1) as loader:
        kept, before = [], []
        for _ in range(6):
            kept.append(KEPT[kind](next(loader)))
            before.append(copies_of(kept[-1]))
        gc.collect()
        for _ in range(30):
            next(loader)
    for one, copies in zip(kept, before, strict=True):
        for now, copy in zip(copies_of(one), copies, strict=True):
            assert np.array_equal(now, copy)


def test_memory_is_used_again(manifest):
    """Also after parts of it were kept for a while: few places for 300 batches."""
    with loader_of(manifest, prefetch=2, side=64) as loader:
        kept = [next(loader).images[2:4] for _ in range(5)]
        next(loader)
        del kept
        places = {next(loader).images.data_ptr() for _ in range(300)}
    assert len(places) <= 5 + 2 + 4


def test_buffers():
    """In memory that is given back to nobody: the same places, and only when they are free."""
    buffers = Buffers((2, 3), pinned=False)
    first, second = buffers.take(), buffers.take()
    place, part = first.data_ptr(), first[1]
    del first
    assert buffers.take().data_ptr() not in (place, second.data_ptr())
    third = buffers.take()
    del part
    assert buffers.take().data_ptr() == place and third.data_ptr() != place


def test_what_was_handed_out_outlives_the_loader(manifest):
    loader = loader_of(manifest)
    batches = [next(loader) for _ in range(3)]
    copies = [batch.images.clone() for batch in batches]
    loader.close()
    del loader
    gc.collect()
    with loader_of(manifest) as other:
        for _ in range(10):
            next(other)
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, copies, strict=True))


@pytest.mark.slow
def test_memory_stays_as_it_is_over_ten_thousand_batches(manifest):
    with loader_of(manifest, side=32, prefetch=2) as loader:
        for _ in range(500):
            next(loader)
        gc.collect()
        before, most = resident_bytes(), 0
        for step in range(10_000):
            next(loader)
            if step % 500 == 499:
                most = max(most, resident_bytes())
    assert most - before < 8e6
