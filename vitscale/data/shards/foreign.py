"""Reads a `.beton` of FFCV's own writer: any fields in any order, images as JPEGs or as raw pixels, no checksums.

`vitscale shards adopt` makes a dataset of such a file. The dataset's manifest says which fields are used, and where the
checksums are that were computed then.
"""

from pathlib import Path

import numpy as np

from vitscale.data.shards.beton import ALLOCATION, BYTES, MODE_JPEG, NO_LABEL, RGB_IMAGE, ShardFile
from vitscale.ground.errors import DataError

INTEGER, IMAGE = "integer", "image"  # kinds of fields that can be used

_MODE_RAW = 1
_SMALLEST_PAGE = 2 << 20
# By FFCV's type id: the kind of a field, and its record in the metadata.
_TYPES = (
    ("float", np.dtype("<f8")),
    (INTEGER, np.dtype("<i8")),
    (IMAGE, RGB_IMAGE),
    ("bytes", BYTES),
    ("array", np.dtype("<u8")),  # its position
    ("JSON", BYTES),
    ("tensor", np.dtype("<u8")),
)


def read_fields(path: str | Path) -> dict[str, str]:
    """A file's fields, in order: name -> kind. Raises DataError as `ForeignShard` does."""
    with _FieldTable(path) as file:
        return file.kinds


class _FieldTable(ShardFile):
    """A file of which only the field table is read: `kinds` has the fields' names and kinds."""

    def _read_head(self, expected_bytes: int | None) -> None:
        self._head = self._read_header(expected_bytes, _SMALLEST_PAGE)
        table = self._read_fields(self._head, self._head.fields)
        names = [bytes(name).decode("ascii", "replace") for name in table["name"]]
        types = table["type"].tolist()
        self._require(len(set(names)) == len(names), f"fields of one name ({', '.join(names)})", "each with its own")
        unknown = [name for name, of in zip(names, types, strict=True) if of >= len(_TYPES)]
        if unknown:
            raise DataError(
                f"{self.path}: the field {unknown[0]!r} is of a type that is not FFCV's own, so the length of its "
                f"metadata is unknown. Write the file without it, or convert the images with vitscale-convert"
            )
        self.fields = tuple(names)
        self.kinds = {name: _TYPES[of][0] for name, of in zip(names, types, strict=True)}
        # Named by position, since NumPy may not accept the names that others chose.
        self._record = np.dtype([(f"f{i}", _TYPES[of][1]) for i, of in enumerate(types)], align=True)


class ForeignShard(_FieldTable):
    """An open file of FFCV's writer, as a shard. A sample's uid is its slot; it has at most one label."""

    def __init__(
        self,
        path: str | Path,
        *,
        image_field: str,
        label_field: str | None,
        crc: np.ndarray | None = None,
        expected_bytes: int | None = None,
    ) -> None:
        """Open a file and check its head.

        Args:
            path: the file's path.
            image_field, label_field: names of the image field and of the integer field to use; None for no labels.
            crc: crc32c of every stored image, uint32 (samples,); None while they are unknown: then `crc` is zero.
            expected_bytes: the file's size according to the manifest.

        Raises DataError if the file is missing, truncated, unfinished or damaged; lacks one of these fields, or has one
        of a type that is not FFCV's own; has a label below -1, or other than as many samples as `crc`.
        """
        self._image_field, self._label_field, self._known_crc = image_field, label_field, crc
        super().__init__(path, expected_bytes)

    def _read_head(self, expected_bytes: int | None) -> None:
        super()._read_head(expected_bytes)
        head = self._head
        metadata = self._read_metadata(head, self._record)
        size = head.total - head.alloc_table
        pieces = size // ALLOCATION.itemsize
        self._require(
            size % ALLOCATION.itemsize == 0 and pieces >= head.samples,
            f"an allocation table of {size:,} bytes",
            f"at least {head.samples} times {ALLOCATION.itemsize} bytes",
        )
        images = self._column(metadata, self._image_field, IMAGE)
        self.samples = head.samples
        self.height, self.width = images["height"].astype(np.int32), images["width"].astype(np.int32)
        self.offset = images["position"].astype(np.int64)
        self.raw = images["mode"] == _MODE_RAW
        self.uid = np.arange(head.samples)
        self.crc = np.zeros(head.samples, np.uint32) if self._known_crc is None else self._known_crc
        self._labels = None
        if self._label_field is None:
            self.label = np.full(head.samples, NO_LABEL)
        else:
            self.label = self._column(metadata, self._label_field, INTEGER).astype(np.int64)
        self._require(
            len(self.crc) == head.samples, f"{head.samples} samples", f"{len(self.crc)}, as many as there are checksums"
        )
        first_byte = head.metadata + metadata.nbytes
        self.size = self._sizes(images["position"], self._read_allocations(head, pieces), first_byte, head.alloc_table)
        raw_bytes = self.height.astype(np.int64) * self.width * 3
        self._refuse(
            {
                "an image that is neither a JPEG nor raw": ~self.raw & (images["mode"] != MODE_JPEG),
                "an image without height or width": raw_bytes == 0,
                "raw pixels that are not height x width x 3 bytes": self.raw & (self.size != raw_bytes),
            }
        )
        if (self.label < NO_LABEL).any():
            slot = int(np.argmax(self.label < NO_LABEL))
            raise DataError(
                f"{self.path}: sample {slot:,} has {int(self.label[slot])} in the field {self._label_field!r}, which "
                f"is no class. Expected class numbers from 0, or {NO_LABEL} for none: are the labels in another field?"
            )

    def _column(self, metadata: np.ndarray, name: str, kind: str) -> np.ndarray:
        """The metadata of a field, (samples,). Raises DataError if there is no field of this name and kind."""
        found = ", ".join(f"{field} ({of})" for field, of in self.kinds.items())
        self._require(self.kinds.get(name) == kind, f"the fields {found}", f"{name} ({kind}) among them")
        return metadata[f"f{self.fields.index(name)}"]

    def _sizes(self, positions: np.ndarray, table: np.ndarray, first_byte: int, end: int) -> np.ndarray:
        """The size of each slot's image in bytes, int64 (samples,): that of the piece allocated at its position."""
        position, size = table["position"], table["size"]
        # Unsigned sums may wrap, but not for a piece that starts inside the file and is no longer than it.
        outside = (position < first_byte) | (position > end) | (size > end) | (position + size > end)
        self._refuse({"a piece outside the pages": outside})
        order = np.argsort(position, kind="stable")  # several processes wrote the file, so pieces are in any order
        order = order[size[order] > 0]  # an empty piece, of another field, shares its position with the next one
        self._require(order.size > 0, "nothing allocated", "images")
        position, size, sample = position[order], size[order], table["sample"][order]
        self._refuse({"overlapping pieces": position[1:] < position[:-1] + size[:-1]})
        at = np.searchsorted(position, positions)
        at[at == len(position)] = 0
        lost = (position[at] != positions) | (sample[at] != self.uid)
        self._refuse({"an image that nothing was allocated for": lost})
        return size[at].astype(np.int64)
