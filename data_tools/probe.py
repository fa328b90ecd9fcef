"""Converts the first images of the shuffled order in memory, to estimate the whole dataset's size, time and losses."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_tools.dedup.against import Candidate, Comparison
from data_tools.dedup.matching import Matcher
from data_tools.dedup.tally import Tally
from data_tools.shard_task import Reader
from vitscale.data.shards.beton import samples_within
from vitscale.data.shards.images import ImageOptions, Reject, store_image
from vitscale.ground.errors import DataError

PROBED = 1000
MAX_SHARD_SAMPLES = 1 << 24


@dataclass(frozen=True)
class Probe:
    """The result of a probe.

    Attributes:
        images: number of images probed.
        rejected: number of these that cannot be stored.
        bytes: total size of those that can, in bytes.
        seconds: time taken.
        tally: counts of copies of test images; None if none were looked for.
    """

    images: int
    rejected: int
    bytes: int
    seconds: float
    tally: Tally | None

    @property
    def bytes_per_image(self) -> float:
        """Mean over the images that can be stored; 0 if none can."""
        return self.bytes / max(self.images - self.rejected, 1)

    def samples_in(self, shard_bytes: int) -> int:
        """Number of images in a shard of about this size in bytes. Raises DataError if no image could be stored."""
        if self.rejected == self.images:
            raise DataError(
                f"none of the first {self.images:,} images can be stored, so the size of a shard is unknown"
            )
        return min(samples_within(shard_bytes, self.bytes_per_image), MAX_SHARD_SAMPLES)


def probe(batches: list[Any], reader: Reader, options: ImageOptions, matcher: Matcher | None = None) -> Probe:
    """Convert the first `PROBED` images of some batches of the plan in memory, and look for copies of test images.

    Raises StorageError.
    """
    images = rejected = size = 0

    def stored_images() -> Iterator[Candidate]:
        nonlocal images, rejected, size
        for batch in batches:
            batch = batch.slice(0, PROBED - images)
            places = zip(batch.column("part").to_pylist(), batch.column("content").to_pylist(), strict=True)
            for part, content in places:
                images += 1
                try:
                    data = reader.read(part, content)
                except OSError:
                    rejected += 1
                    continue
                stored = store_image(data, options)
                if isinstance(stored, Reject):
                    rejected += 1
                    continue
                size += len(stored.jpeg)
                yield Candidate.of(stored, data, uid=images)

    comparison = Comparison(matcher) if matcher is not None else None
    started = time.perf_counter()
    for _ in stored_images() if comparison is None else comparison.kept(stored_images()):
        pass
    seconds = time.perf_counter() - started
    return Probe(images, rejected, size, seconds, None if comparison is None else comparison.findings.tally)
