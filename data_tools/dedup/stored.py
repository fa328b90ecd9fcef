"""Samples of a stored shard as queries: fingerprints from the table beside it, pictures from the shard when needed.

A table from an older version of vitscale, or of another algorithm, has no comparable fingerprints: then all images are
decoded and fingerprinted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.dedup.fingerprint import ALGORITHM, Fingerprint, fingerprint
from data_tools.dedup.luma import Window
from data_tools.dedup.pictures import small_picture
from vitscale.data.shards import Manifest
from vitscale.data.shards.opening import OpenShard, local_copy, open_shard
from vitscale.data.shards.provenance import (
    FINGERPRINT_COLUMNS,
    fingerprint_algorithm,
    provenance_path,
    read_provenance,
)
from vitscale.ground.errors import DataError
from vitscale.ground.storage import size_of

_AT_ONCE = 128  # queries: fast to compare, and few enough lumas


@dataclass(eq=False)
class StoredQuery:
    """A selected sample: a `matching.Query` with its key and its place.

    Attributes:
        uid, key: the sample's; without a key of its own, the key is made from the uid.
        sha256: digest of the source's file; without a table, of the stored bytes.
        pixels, quality, pdq, pdq_trimmed: as in `matching.Query`.
        slot, shard: where the sample is.
        made: the fingerprint of the picture as stored, once it is needed.
    """

    uid: int
    key: str
    sha256: bytes
    pixels: int
    quality: int
    pdq: bytes
    pdq_trimmed: bytes | None
    slot: int
    shard: "ShardQueries"
    made: Fingerprint | None = None

    def luma(self, trimmed: bool) -> np.ndarray:
        """uint8 (64, 64). Raises DataError if the sample is damaged."""
        made = self._made()
        # Re-encoded, a picture may have lost what was a border in the source's pixels.
        return made.luma_trimmed if trimmed and made.luma_trimmed is not None else made.luma

    @property
    def inside(self) -> Window | None:
        """The part within borders. Raises DataError if the sample is damaged."""
        return self._made().inside

    def _made(self) -> Fingerprint:
        if self.made is None:
            self.made = fingerprint(self.rgb())
        return self.made

    def rgb(self) -> np.ndarray:
        """The picture, uint8 (height, width, 3). Raises DataError if the sample is damaged."""
        return self.shard.rgb(self.slot)

    def picture(self) -> bytes:
        """A small JPEG of it. Raises DataError if the sample is damaged."""
        return small_picture(self.rgb())


class ShardQueries:
    """The selected samples of a shard.

    Attributes:
        are_fresh: whether their fingerprints had to be computed now.
    """

    def __init__(self, manifest: Manifest, index: int, table: pa.Table | None, stack: ExitStack) -> None:
        self._manifest, self._index, self._table, self._stack = manifest, index, table, stack
        self.are_fresh = table is None or fingerprint_algorithm(table) != ALGORITHM
        self._shard: OpenShard | None = None
        self._last: tuple[int, np.ndarray] | None = None

    def batches(self) -> Iterator[list[StoredQuery]]:
        """All samples in order of slots, a hundred or so at a time."""
        slots = self._manifest.slots(self._index)
        for start in range(0, len(slots), _AT_ONCE):
            some = slots[start : start + _AT_ONCE]
            rows: list[dict[str, Any]] = [{}] * len(some) if self._table is None else self._table.take(some).to_pylist()
            yield [self._query(slot, row) for slot, row in zip(some.tolist(), rows, strict=True)]

    def rgb(self, slot: int) -> np.ndarray:
        """The picture of a slot, uint8 (height, width, 3). Raises DataError if it is damaged, or StorageError."""
        if self._last is None or self._last[0] != slot:
            self._last = slot, self._open().pixels(slot)
        return self._last[1]

    def _query(self, slot: int, row: dict[str, Any]) -> StoredQuery:
        if not self.are_fresh:
            facts = row["pixels"], row["pdq_quality"], row["pdq"], row["pdq_trimmed"]
            return StoredQuery(row["uid"], row["key"], row["sha256"], *facts, slot=slot, shard=self)
        shard = self._open()
        made, uid = fingerprint(self.rgb(slot)), int(shard.file.uid[slot])
        digest = row["sha256"] if row else sha256(shard.image(slot)).digest()
        facts = made.pixels, made.quality, made.pdq, made.pdq_trimmed
        return StoredQuery(uid, row.get("key", f"uid-{uid}"), digest, *facts, slot=slot, shard=self, made=made)

    def _open(self) -> OpenShard:
        """The shard itself, opened only when it is needed: at a URL it is a large file."""
        if self._shard is None:
            self._shard = self._stack.enter_context(open_shard(self._manifest, self._index, with_keys=False))
            file = self._shard.file
            if self._table is not None and not np.array_equal(self._table["uid"].to_numpy(), file.uid):
                raise DataError(
                    f"{file.path}: its table of provenance has other uids; `vitscale shards verify` tells more"
                )
        return self._shard


@contextmanager
def shard_queries(manifest: Manifest, index: int) -> Iterator[ShardQueries]:
    """The selected samples of a shard of a dataset.

    Raises:
        DataError: the shard or its table is missing or damaged.
        StorageError: a URL that does not answer.
    """
    entry = manifest.shards[index]
    beside = provenance_path(manifest.location(entry.path))
    table = None
    if size_of(beside) is not None:
        with local_copy(beside) as path:
            table = read_provenance(path, ["uid", "key", "sha256", *FINGERPRINT_COLUMNS])
        if table.num_rows != entry.samples:
            raise DataError(f"{beside}: {table.num_rows:,} rows; the manifest says {entry.samples:,} samples")
    with ExitStack() as stack:
        yield ShardQueries(manifest, index, table, stack)
