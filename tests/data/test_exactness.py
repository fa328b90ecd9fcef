"""The global batches are a function of (seed, step): whatever the world, its threads, and wherever it was resumed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_processes import global_batches, in_processes, processes, read, world_of
from picture_shards import write_pictures

from vitscale.data.shards import SelectFirst

SHARDS, BATCH, SIDE, STEPS = [40, 33, 40, 7, 25], 16, 12, 20  # nine steps an epoch
WORLDS, THREADS = (1, 2, 4, 8), (1, 2, 3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_pictures(tmp_path_factory.mktemp("exactness") / "data", SHARDS).directory)


@pytest.fixture(scope="module")
def reference(folder):
    """One rank, one thread, nothing ahead, without an interruption; in this process."""
    (run,) = world_of(1, 0, STEPS, threads=1, prefetch=1)
    return global_batches([read(folder, BATCH, SIDE, run)])


@pytest.fixture(scope="module")
def pool():
    with processes(2) as pool:
        yield pool


def test_a_resume_at_every_step_onto_every_world(folder, reference, pool):
    """Any of the four worlds up to some step, and two of them from there."""
    starts = [(start, WORLDS[(start + more) % 4]) for start in range(1, STEPS) for more in (0, 2)]
    tails = [world_of(size, start, STEPS, threads=1 + start % 4, prefetch=1 + start % 3) for start, size in starts]
    for (start, _), found in zip(starts, in_processes(pool, folder, BATCH, SIDE, tails), strict=True):
        assert found == reference[start:]
    stops = list(zip((1, 5, 9, 10), WORLDS, strict=True))
    heads = [world_of(size, 0, stop, threads=2) for stop, size in stops]
    for (stop, _), found in zip(stops, in_processes(pool, folder, BATCH, SIDE, heads), strict=True):
        assert found == reference[:stop]


def test_with_pictures_halved_by_the_decoder(folder, pool):
    """Other pixels, as exact."""
    (run,) = world_of(1, 0, STEPS, dct_scaling=True)
    reference = global_batches([read(folder, BATCH, SIDE, run)])
    worlds = [world_of(size, start, STEPS, dct_scaling=True, threads=size) for size in (2, 4) for start in (0, 7)]
    for found, start in zip(in_processes(pool, folder, BATCH, SIDE, worlds), (0, 7, 0, 7), strict=True):
        assert found == reference[start:]


# ------------------------------------------------------------------------------------------------------------ any sizes


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
    base.model_copy(update={"num_samples": sum(sizes), "shards": tuple(entries)}).save(folder)
    stop = start + 3
    (alone,) = world_of(1, max(0, start - 2), stop, prefetch=1)
    expected = global_batches([read(str(folder), batch, 8, alone)])[min(start, 2) :]
    found = global_batches(read(str(folder), batch, 8, run) for run in world_of(world, start, stop, **options))
    assert found == expected and [part.step for part in found] == [start, start + 1, start + 2]
    selected = {3 * (20 * shard + slot) for shard, size in enumerate(sizes) for slot in range(size)}
    for part in found:
        assert len(part.samples) == batch and {uid for uid, *_ in part.samples} <= selected


test_any_sizes = settings(max_examples=20, deadline=None, derandomize=True)(given(trainings())(any_sizes))


# --------------------------------------------------------------------------------------------------- the whole matrix

test_many_sizes = pytest.mark.slow(settings(max_examples=200, deadline=None)(given(trainings())(any_sizes)))
