"""How a loader reads: threads, checks, cache, and what becomes of damaged samples."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vitscale.recipe import Cache, Data

_FEWEST_THREADS, _MOST_THREADS = 2, 16


@dataclass(frozen=True)
class Reading:
    """Nothing here changes what a sound sample looks like, but for `dct_scaling`.

    Attributes:
        threads: that read and decode.
        prefetch: batches that wait at most; another one is being made.
        verify_shards: compare each shard with its manifest's digest when this machine first opens it.
        check_rate: share of samples whose own checksum is compared whenever they are read.
        bad_samples: what becomes of a damaged sample: an error; the next sound one of its shard stands in for it; or it
            is masked.
        dct_scaling: let the decoder halve pictures that are at least twice as large as needed.
        stall_s: seconds after which a read that has not returned is an error.
        cache: folder for shards that come from elsewhere, and for what is known of shards.
        cache_bytes: of those shards at most, unless more are in use at a time.
        pinned: put batches into page-locked memory, for CUDA.
    """

    threads: int = 2
    prefetch: int = 2
    verify_shards: bool = True
    check_rate: float = 1.0
    bad_samples: Literal["error", "substitute", "mask"] = "error"
    dct_scaling: bool = False
    stall_s: float = 300.0
    cache: Path = field(default_factory=lambda: Cache().folder())
    cache_bytes: int = 10**11
    pinned: bool = False

    @classmethod
    def of(cls, data: Data, *, pinned: bool = False) -> "Reading":
        """As a recipe says. Raises `RecipeError` where there is no place for a cache."""
        return cls(
            threads=data.threads or (_threads_beside_a_device() if pinned else _FEWEST_THREADS),
            prefetch=data.prefetch,
            verify_shards=data.verify_shards,
            check_rate=data.check_rate,
            bad_samples=data.bad_samples,
            dct_scaling=data.dct_scaling,
            stall_s=data.stall_s,
            cache=data.cache.folder(),
            cache_bytes=int(data.cache.limit_gb * 10**9),
            pinned=pinned,
        )

    def for_evaluation(self) -> "Reading":
        """The same, but that no sample stands in for another: each counts once."""
        return replace(self, bad_samples="error" if self.bad_samples == "error" else "mask")


def _threads_beside_a_device() -> int:
    """A rank's part of its machine's cores, but for the one that keeps the device at work.

    On CPUs, where training itself takes all cores, it is two.
    """
    ranks_here, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    if cores * ranks_here > (os.cpu_count() or 1):  # else this rank has been bound to its own part
        cores //= ranks_here
    return min(_MOST_THREADS, max(_FEWEST_THREADS, cores - 1))
