"""The global batches are a function of (seed, step): whatever the world, its threads, and wherever it was resumed."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
from damage import flip_byte, store_zeros
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import joined, read, same
from picture_shards import write_pictures

from vitscale import recipe
from vitscale.data.shards import Manifest, SelectFirst

SHARDS, STEPS = [40, 33, 40, 7, 25], 20  # nine steps an epoch
WORLDS = (1, 2, 4, 8)
AUGMENTED = (
    recipe.RandAugment(kind="randaugment", set="timm_increasing", m=9, std=0.5),
    recipe.ThreeAugment(kind="three_augment"),
)


@pytest.fixture(scope="module")
def pool():
    """New processes of this machine, that share nothing with this one."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


def read_rank(folder, options):
    return pickle.dumps(read(Manifest.load(folder), **options))


def in_processes(pool, manifest, *worlds):
    """The global batches of each of these worlds, all ranks of which run somewhere in the pool."""
    waiting = [
        [pool.submit(read_rank, manifest.directory, {"rank": rank, **world}) for rank in range(world["world"])]
        for world in worlds
    ]
    return [joined(pickle.loads(future.result(300)) for future in futures) for futures in waiting]


def test_a_resume_at_every_step_onto_every_world(manifest, pool):
    """Any of the four worlds up to some step, and two of them from there."""
    reference = read(manifest, stop=STEPS, threads=1, prefetch=1)
    assert all(batch.mask.all() for batch in reference)
    tails = [
        {"world": WORLDS[(start + more) % 4], "start": start, "stop": STEPS, "threads": 1 + start % 4}
        | {"prefetch": 1 + start % 3}
        for start in range(1, STEPS)
        for more in (0, 2)
    ]
    heads = [{"world": size, "stop": stop} for stop, size in zip((1, 5, 9, 10), WORLDS, strict=True)]
    for world, found in zip(tails + heads, in_processes(pool, manifest, *tails, *heads), strict=True):
        assert same(found, reference[world.get("start", 0) : world["stop"]])


@pytest.mark.parametrize(
    "options",
    [
        {"dct_scaling": True},
        {"operations": AUGMENTED},
        {"bad_samples": "substitute", "verify_shards": False},
        {"bad_samples": "mask", "verify_shards": False},
    ],
    ids=["dct_scaling", "operations", "substitute", "mask"],
)
def test_whatever_is_done_to_pictures(tmp_path, pool, options):
    """Halved by the decoder, changed by operations, damaged: several of every kind, also in a row."""
    manifest = write_pictures(tmp_path / "data", SHARDS)
    if "bad_samples" in options:
        manifest = store_zeros(flip_byte(manifest, 0, [3, 4, 5, 19]), 2, [0, 6, 11])
    reference = read(manifest, stop=STEPS, threads=1, prefetch=1, **options)
    assert "bad_samples" not in options or sum(batch.bad_samples for batch in reference) > 10
    worlds = [
        {"world": size, "start": start, "stop": STEPS, "threads": threads, "prefetch": prefetch, **options}
        for size in (1, 2, 4, 16)
        for start, threads, prefetch in ((0, 4, 1), (1, 3, 3), (7, 1, 2), (11, 2, 1))
    ]
    for world, found in zip(worlds, in_processes(pool, manifest, *worlds), strict=True):
        assert same(found, reference[world["start"] :])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Shards of 20, of which an example takes as many samples as it wants."""
    return write_pictures(tmp_path_factory.mktemp("sizes") / "data", [20] * 9)


@st.composite
def trainings(draw):
    sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(sum))
    world = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    share = draw(st.integers(1, max(1, min(24, sum(sizes)) // world)))
    if share * world > sum(sizes):
        world, share = 1, 1
    batch = share * world
    start = draw(st.integers(0, 2 * (sum(sizes) // batch) + 2))
    options = {"threads": draw(st.integers(1, 4)), "prefetch": draw(st.integers(1, 4))}
    return sizes, batch, world, start, options


def any_sizes(base, tmp_path_factory, training):
    """Of shards, batches and worlds, from any step: what one rank with one thread reads from there."""
    sizes, batch, world, start, options = training
    folder = tmp_path_factory.mktemp("example")
    above = f"../{base.directory.relative_to(folder.parent)}"
    entries = [
        entry.model_copy(update={"select": SelectFirst(first=size), "path": f"{above}/{entry.path}"})
        for entry, size in zip(base.shards, sizes, strict=False)
    ]
    part = base.model_copy(update={"num_samples": sum(sizes), "shards": tuple(entries)}).save(folder)
    steps = {"batch": batch, "stop": start + 3}
    expected = read(part, start=max(0, start - 2), threads=1, prefetch=1, **steps)[min(start, 2) :]
    found = list(joined(read(part, rank=rank, world=world, start=start, **steps, **options) for rank in range(world)))
    assert same(found, expected) and [batch.position for batch in found] == [start, start + 1, start + 2]
    selected = {3 * (20 * shard + slot) for shard, size in enumerate(sizes) for slot in range(size)}
    assert all(len(one.uids) == batch and set(one.uids.tolist()) <= selected for one in found)


test_any_sizes = settings(max_examples=20, deadline=None, derandomize=True)(given(trainings())(any_sizes))
test_many_sizes = pytest.mark.slow(settings(max_examples=200, deadline=None)(given(trainings())(any_sizes)))
