"""The first images of the shuffled order, converted for what they tell of the others: size, time, losses."""

import time
from dataclasses import dataclass
from typing import Any

from data_tools.images import ImageOptions, Reject, store_image
from data_tools.shard_task import Reader
from vitscale.errors import DataError

PROBED = 1000
MAX_SHARD_SAMPLES = 1 << 24


@dataclass(frozen=True)
class Probe:
    """What became of the probed images: how many there were and could not be stored, bytes stored, seconds taken."""

    images: int
    rejected: int
    bytes: int
    seconds: float

    @property
    def bytes_per_image(self) -> float:
        """Mean over the images that can be stored; 0 if none can."""
        return self.bytes / max(self.images - self.rejected, 1)

    def samples_in(self, shard_bytes: int) -> int:
        """How many images fit into a shard of about that size. Raises DataError where no image could be stored."""
        if self.rejected == self.images:
            raise DataError(f"none of the first {self.images:,} images can be stored, so a shard's size is unknown")
        return min(max(1, int(shard_bytes / self.bytes_per_image)), MAX_SHARD_SAMPLES)


def probe(batches: list[Any], reader: Reader, options: ImageOptions) -> Probe:
    """Convert the first `PROBED` images of some batches of the plan, in memory. Raises StorageError."""
    images = rejected = size = 0
    started = time.perf_counter()
    for batch in batches:
        batch = batch.slice(0, PROBED - images)
        for part, content in zip(batch.column("part").to_pylist(), batch.column("content").to_pylist(), strict=True):
            images += 1
            try:
                stored = store_image(reader.read(part, content), options)
            except OSError:
                rejected += 1
                continue
            if isinstance(stored, Reject):
                rejected += 1
            else:
                size += len(stored.jpeg)
    return Probe(images, rejected, size, time.perf_counter() - started)
