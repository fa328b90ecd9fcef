"""How a loader reads: threads, checks, cache, and the policy for damaged samples."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vitscale.recipe import Cache, Data

_FEWEST_THREADS, _MOST_THREADS = 2, 16
_AS_IN_RECIPES = ("prefetch", "verify_shards", "check_rate", "bad_samples", "dct_scaling", "stall_s")


@dataclass(frozen=True)
class Reading:
    """A loader's settings. Only `dct_scaling` changes what an undamaged sample looks like."""

    threads: int = 2  # that read and decode
    prefetch: int = 2  # batches that wait at most; one more is being made
    verify_shards: bool = True  # compare each shard with its manifest's digest when this machine first opens it
    check_rate: float = 1.0  # the share of samples whose own checksum is compared whenever they are read
    # For a damaged sample: raise, put the next sound sample of its shard in its place, or mask it.
    bad_samples: Literal["error", "substitute", "mask"] = "error"
    dct_scaling: bool = False  # let the decoder halve pictures that are at least twice as large as needed
    stall_s: float = 300.0  # after which a read that has not returned is an error
    cache: Path = field(default_factory=lambda: Cache().folder())  # for fetched shards and the record of verified ones
    cache_bytes: int = 10**11  # the limit for the fetched shards, unless more are in use at a time
    pinned: bool = False  # put batches into page-locked memory, for CUDA

    @classmethod
    def of(cls, data: Data, *, pinned: bool = False) -> "Reading":
        """The settings that a recipe gives. Raises `RecipeError` if there is no place for a cache."""
        return cls(
            threads=data.threads or (_threads_beside_a_device() if pinned else _FEWEST_THREADS),
            **{key: getattr(data, key) for key in _AS_IN_RECIPES},
            cache=data.cache.folder(),
            cache_bytes=int(data.cache.limit_gb * 10**9),
            pinned=pinned,
        )

    def for_evaluation(self) -> "Reading":
        """The same settings, but masking instead of substituting damaged samples, so that each sample counts once."""
        return replace(self, bad_samples="error" if self.bad_samples == "error" else "mask")


def _threads_beside_a_device() -> int:
    """Threads of a loader with a device: this rank's part of the machine's cores, less one that keeps the device busy.

    At least 2, at most 16. Without a device, training itself takes all cores, and a loader has two threads.
    """
    ranks_here, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    if cores * ranks_here > (os.cpu_count() or 1):  # otherwise this rank has been bound to its own part
        cores //= ranks_here
    return min(_MOST_THREADS, max(_FEWEST_THREADS, cores - 1))
