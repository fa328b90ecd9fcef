"""How many threads read where a recipe does not say."""

import os

import pytest

from vitscale.data.settings import Reading
from vitscale.recipe import Data


@pytest.mark.parametrize(
    ("machine", "cores", "ranks", "threads"),
    [(192, 192, 8, 16), (112, 112, 8, 13), (112, 14, 8, 13), (32, 32, 1, 16), (8, 8, 4, 2), (1, 1, 1, 2)],
)
def test_beside_a_device_a_rank_s_part_of_the_cores_reads(monkeypatch, machine, cores, ranks, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert Reading.of(Data(train="train"), pinned=True).threads == threads
    assert Reading.of(Data(train="train", threads=5), pinned=True).threads == 5
    assert Reading.of(Data(train="train")).threads == 2
