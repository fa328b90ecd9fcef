"""Images that may be copies of test images: while they are converted, or as samples of a stored shard.

A sample's fingerprint comes from the table beside its shard. A table from an older version of vitscale, or of another
algorithm, has no comparable ones: then all images are decoded and fingerprinted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from data_tools.dedup.fingerprint import ALGORITHM, Fingerprint, Window, fingerprint
from vitscale.data.shards import Manifest
from vitscale.data.shards.images import StoredImage
from vitscale.data.shards.opening import OpenShard, open_shard, table_beside
from vitscale.data.shards.provenance import FINGERPRINT_COLUMNS, fingerprint_algorithm
from vitscale.ground.errors import DataError
from vitscale.ground.images import decode, encode

PICTURE_SIDE = 128  # pixels of the longer side of a small picture at most
_PICTURE_QUALITY = 85
_AT_ONCE = 128  # samples of a shard: fast to compare, and few enough lumas


def small_picture(rgb: np.ndarray) -> bytes:
    """A picture, uint8 (height, width, 3), as a JPEG of at most 128 x 128 pixels, for people to look at."""
    height, width, _ = rgb.shape
    scale = min(1.0, PICTURE_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return encode(np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BOX)), _PICTURE_QUALITY)


@dataclass(eq=False)
class Query:
    """An image that may be a copy. Its picture is looked at only if its hash is near a test image's."""

    uid: int
    key: str  # without a key of its own, made from the uid
    sha256: bytes  # digest of the source's file; if that is not known, of the stored bytes
    pixels: int  # this and the next three: as in `Fingerprint`
    quality: int
    pdq: bytes
    pdq_trimmed: bytes | None
    rgb: Callable[[], np.ndarray]  # the picture as stored, uint8 (height, width, 3), decoded anew; may raise DataError
    made: Fingerprint | None  # of that picture, once it is needed

    def luma(self, trimmed: bool) -> np.ndarray:
        """uint8 (64, 64), of the whole picture or of the part within its borders. Raises DataError for damage."""
        made = self._made()
        # Re-encoded, a picture may have lost what was a border in the source's pixels.
        return made.luma_trimmed if trimmed and made.luma_trimmed is not None else made.luma

    @property
    def inside(self) -> Window | None:
        """The part of the picture within uniform borders; None if it has none. Raises DataError for damage."""
        return self._made().inside

    def picture(self) -> bytes:
        """A small JPEG of it. Raises DataError for damage."""
        return small_picture(self.rgb())

    def _made(self) -> Fingerprint:
        if self.made is None:
            self.made = fingerprint(self.rgb())
        return self.made


@dataclass(eq=False)
class Candidate(Query):
    """A converted image, before it is stored; the last fields are those of its `images.StoredImage`."""

    labels: Sequence[int]
    jpeg: bytes
    height: int
    width: int
    passed_through: bool

    @classmethod
    def of(
        cls, stored: StoredImage, content: bytes, uid: int = 0, key: str = "", labels: Sequence[int] = ()
    ) -> "Candidate":
        """The candidate for `content`, an image file's bytes, and the image stored for it."""
        made, jpeg, height, width = fingerprint(stored.pixels), stored.jpeg, stored.height, stored.width
        hashes = made.pixels, made.quality, made.pdq, made.pdq_trimmed
        digest = sha256(content).digest()

        def rgb() -> np.ndarray:  # few are asked for, so no picture is held
            return decode(jpeg, height, width)[1]

        return cls(uid, key, digest, *hashes, rgb, made, labels, jpeg, height, width, stored.passed_through)


class ShardQueries(ExitStack):
    """The selected samples of a shard; a context manager. `are_fresh`: whether their fingerprints are computed now.

    Raises DataError if the shard or its table is missing or damaged, StorageError if a URL does not answer.
    """

    def __init__(self, manifest: Manifest, index: int) -> None:
        super().__init__()
        self._manifest, self._index = manifest, index
        self._table: pa.Table | None = table_beside(manifest, index, ["uid", "key", "sha256", *FINGERPRINT_COLUMNS])
        self.are_fresh = self._table is None or fingerprint_algorithm(self._table) != ALGORITHM
        self._shard: OpenShard | None = None

    def batches(self) -> Iterator[list[Query]]:
        """All samples in order of slots, a hundred or so at a time."""
        slots = self._manifest.slots(self._index)
        for start in range(0, len(slots), _AT_ONCE):
            some = slots[start : start + _AT_ONCE]
            rows: list[dict[str, Any]] = [{}] * len(some) if self._table is None else self._table.take(some).to_pylist()
            yield [self._query(slot, row) for slot, row in zip(some.tolist(), rows, strict=True)]

    def _query(self, slot: int, row: dict[str, Any]) -> Query:
        def rgb() -> np.ndarray:
            return self._open().pixels(slot)

        if not self.are_fresh:
            hashes = row["pixels"], row["pdq_quality"], row["pdq"], row["pdq_trimmed"]
            return Query(row["uid"], row["key"], row["sha256"], *hashes, rgb, None)
        shard = self._open()
        made, uid = fingerprint(rgb()), int(shard.file.uid[slot])
        digest = row["sha256"] if row else sha256(shard.image(slot)).digest()
        hashes = made.pixels, made.quality, made.pdq, made.pdq_trimmed
        return Query(uid, row.get("key", f"uid-{uid}"), digest, *hashes, rgb, made)

    def _open(self) -> OpenShard:
        """The shard itself, opened only when it is needed: at a URL it is a large file."""
        if self._shard is None:
            self._shard = self.enter_context(open_shard(self._manifest, self._index, with_keys=False))
            file = self._shard.file
            if self._table is not None and not np.array_equal(self._table["uid"].to_numpy(), file.uid):
                raise DataError(
                    f"{file.path}: its table of provenance has other uids; `vitscale shards verify` tells more"
                )
        return self._shard
