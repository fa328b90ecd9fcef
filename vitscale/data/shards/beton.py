"""One shard: FFCV's `.beton` format, version 2, written and read by our own code.

FFCV's writer hangs on a bad sample, re-encodes every image and writes other bytes each time; its reader believes
whatever a damaged file says. The format itself is sound, and stock FFCV opens what is written here.

    header           24 B: version u2, fields u2, page size u4, samples u8, position of the allocation table u8
    field table      1041 B a field: type u1, name 16 B, arguments 1024 B
    metadata         one aligned record a sample: image (mode u1, width u2, height u2, position u8), label, uid, crc i8,
                     optionally labels (position u8, size u8)
    pages            image bytes, followed by the sample's labels if any; no sample crosses a page
    allocation table (sample u8, position u8, size u8) for every piece, in order, up to the end of the file

A page is 8 MiB, or more if an image is larger. A large shard leaves the rest of the metadata's last page empty, so that
its images stay where they were written although the number of samples is known only at the end. In a shard of up to 64
MiB of images, which is cheap to move, they follow the metadata directly, so that a few thumbnails do not cost a page.
There is one valid layout for a list of samples, hence equal samples give equal bytes.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np

from vitscale.ground.errors import DataError, os_errors
from vitscale.ground.files.durable import durable_file
from vitscale.ground.images import crc32c
from vitscale.ground.storage import regular

DEFAULT_CAPACITY = 8192
DEFAULT_PAGE_BYTES = 8 << 20
MAX_PAGE_BYTES = 2 << 30  # the largest power of two that the header's u4 holds
PACKED_BYTES = 64 << 20  # up to this many bytes, images and labels begin directly after the metadata
MAX_SIDE = 65535  # pixels; u2 in the metadata
NO_LABEL = -1

_VERSION = 2
_HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page_size", "<u4"), ("samples", "<u8"), ("alloc_table", "<u8")]
)
_FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
ALLOCATION = np.dtype([("sample", "<u8"), ("position", "<u8"), ("size", "<u8")])
RGB_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("position", "<u8")])
BYTES = np.dtype([("position", "<u8"), ("size", "<u8")])
MODE_JPEG = 0

# name, FFCV's type id, record in the metadata
_FIELDS: tuple[tuple[str, int, np.dtype], ...] = (
    ("image", 2, RGB_IMAGE),
    ("label", 1, np.dtype("<i8")),
    ("uid", 1, np.dtype("<i8")),
    ("crc", 1, np.dtype("<i8")),
)
_LABELS_FIELD: tuple[str, int, np.dtype] = ("labels", 3, BYTES)


def field_names(with_labels: bool) -> tuple[str, ...]:
    """The names of a shard's fields, in order."""
    return tuple(name for name, _, _ in _fields(with_labels))


def _fields(with_labels: bool) -> tuple[tuple[str, int, np.dtype], ...]:
    return (*_FIELDS, _LABELS_FIELD) if with_labels else _FIELDS


def _metadata_type(with_labels: bool) -> np.dtype:
    return np.dtype([(name, kind) for name, _, kind in _fields(with_labels)], align=True)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class StoredSample(NamedTuple):
    """One sample as it goes to disk."""

    image: bytes  # of a JPEG file
    height: int  # pixels, 1 to 65535, as the JPEG's own header says
    width: int
    label: int  # class index; -1 for none
    uid: int  # the sample's slot in the conversion's shuffled plan
    # All labels, int32, the first of them equal to `label`; empty for none. None for every sample of a shard whose
    # samples have at most one label.
    labels: np.ndarray | None = None


@dataclass(frozen=True)
class ShardStats:
    """Facts about a written shard: counts, sizes in bytes, the uid of slot 0, and crc32c per slot (uint32)."""

    samples: int
    bytes: int
    image_bytes: int
    page_bytes: int
    first_uid: int
    crc: np.ndarray = field(repr=False)


class _Layout:
    """Positions of samples in the file: consecutive, except that none crosses a page.

    The first is at the start of a page, or directly after the metadata if `packed`.
    """

    def __init__(self, capacity: int, with_labels: bool, page_bytes: int, packed: bool) -> None:
        self._page_bytes = page_bytes
        self._next = _round_up(_head_bytes(capacity, with_labels), 8 if packed else page_bytes)

    def place(self, size: int) -> int:
        position = self._next
        if position // self._page_bytes != (position + size - 1) // self._page_bytes:
            position = _round_up(position, self._page_bytes)
        self._next = position + size
        return position


def _head_bytes(samples: int, with_labels: bool) -> int:
    """Bytes before the first page: header, field table and metadata."""
    fields = _HEADER.itemsize + len(_fields(with_labels)) * _FIELD.itemsize
    return fields + samples * _metadata_type(with_labels).itemsize


def expected_bytes(samples: int, image_bytes: float) -> int:
    """Roughly the bytes of a shard of so many samples with one label each, by the mean bytes of their images."""
    data = samples * image_bytes
    start = _head_bytes(samples, False)
    if data > PACKED_BYTES:
        start = _round_up(start, DEFAULT_PAGE_BYTES)
    pages = (start + data) // DEFAULT_PAGE_BYTES  # at the end of each full page about half an image's room is unused
    return round(start + data + pages * image_bytes / 2) + samples * ALLOCATION.itemsize


def write_shard(path: str | Path, samples: Iterable[StoredSample], capacity: int = DEFAULT_CAPACITY) -> ShardStats:
    """Write one shard; equal samples give equal bytes, whatever `capacity` is.

    Image bytes go to the disk as they come. `capacity` is the largest number of samples expected; it only saves moving
    the images of a large shard whose metadata take more than one page.

    Raises DataError if a sample is larger than 2 GiB or there is none, ValueError if one contradicts `StoredSample`,
    and OSError. Nothing is left behind in any of these cases.
    """
    with durable_file(path) as file:
        return _write(file, samples, capacity, Path(path))


def _write(file: BinaryIO, samples: Iterable[StoredSample], capacity: int, path: Path) -> ShardStats:
    with_labels = False
    layout: _Layout | None = None
    rows: list[tuple[int, ...]] = []  # height, width, label, uid, crc, bytes of the image, bytes of the labels
    positions: list[int] = []
    for sample in samples:
        if layout is None:
            with_labels = sample.labels is not None
            layout = _Layout(capacity, with_labels, DEFAULT_PAGE_BYTES, packed=False)
        labels = _label_bytes(sample, with_labels)
        size = len(sample.image) + len(labels)
        if size > MAX_PAGE_BYTES:
            raise DataError(
                f"{path}: the sample with uid {sample.uid} has {size:,} bytes; at most {MAX_PAGE_BYTES:,} are possible"
            )
        position = layout.place(size)
        file.seek(position)
        file.write(sample.image)
        file.write(labels)
        stated = sample.height, sample.width, sample.label, sample.uid
        rows.append((*stated, crc32c(sample.image), len(sample.image), len(labels)))
        positions.append(position)
    if not rows:
        raise DataError(f"{path}: a shard without samples cannot be written")

    # The layout above assumed the number and the sizes of the samples; the one below knows them.
    height, width, label, uid, crc, images, extras = np.array(rows, np.int64).T
    sizes = (images + extras).tolist()
    page_bytes = DEFAULT_PAGE_BYTES
    while page_bytes < max(sizes):
        page_bytes *= 2
    final = _Layout(len(rows), with_labels, page_bytes, packed=sum(sizes) <= PACKED_BYTES)
    final_positions = [final.place(size) for size in sizes]
    if final_positions != positions:
        _move(file, positions, final_positions, sizes)

    where = np.array(final_positions, np.int64)
    metadata = np.zeros(len(rows), _metadata_type(with_labels))
    metadata["image"]["mode"] = MODE_JPEG
    metadata["image"]["height"], metadata["image"]["width"] = height, width
    metadata["image"]["position"] = where
    metadata["label"], metadata["uid"], metadata["crc"] = label, uid, crc
    if with_labels:
        metadata["labels"]["position"], metadata["labels"]["size"] = where + images, extras

    alloc_table = _round_up(final_positions[-1] + sizes[-1], 8)
    file.truncate(alloc_table)
    file.seek(alloc_table)
    file.write(_allocations(metadata, images, with_labels).tobytes())
    total_bytes = file.tell()
    header = np.array((_VERSION, len(_fields(with_labels)), page_bytes, len(rows), alloc_table), _HEADER)
    file.seek(0)
    file.write(header.tobytes() + _field_table(with_labels).tobytes() + metadata.tobytes())
    return ShardStats(len(rows), total_bytes, int(images.sum()), page_bytes, int(uid[0]), crc.astype(np.uint32))


def _label_bytes(sample: StoredSample, with_labels: bool) -> bytes:
    """The sample's labels as stored. Also checks the sample: raises ValueError if it contradicts `StoredSample`."""
    if not sample.image or not 1 <= sample.height <= MAX_SIDE or not 1 <= sample.width <= MAX_SIDE:
        raise ValueError(f"uid {sample.uid}: {len(sample.image)} bytes of {sample.height} x {sample.width} pixels")
    if (sample.labels is not None) != with_labels:
        raise ValueError(f"uid {sample.uid}: either every sample of a shard has `labels`, or none has")
    if sample.labels is None:
        return b""
    # FFCV cannot hold an empty piece (two pieces would share a position): no labels are stored as one NO_LABEL.
    labels = np.asarray(sample.labels, "<i4") if len(sample.labels) else np.array([NO_LABEL], "<i4")
    if labels.ndim != 1 or labels[0] != sample.label:
        raise ValueError(f"uid {sample.uid}: label {sample.label} is not the first of its labels {labels.tolist()}")
    return labels.tobytes()


def _move(file: BinaryIO, old: list[int], new: list[int], sizes: list[int]) -> None:
    """Move pieces to their final positions within the file, one in memory at a time, and fill the gaps with zeros.

    If no piece moves to a higher position, none overwrites one that is still to move. Otherwise all are first copied to
    a region behind everything.
    """
    source = old
    if any(after > before for before, after in zip(old, new, strict=True)):
        source = list(accumulate(sizes[:-1], initial=max(old[-1], new[-1]) + sizes[-1]))
        for position, spooled, size in zip(old, source, sizes, strict=True):
            _copy(file, position, spooled, size)
    end = min(old[0], new[0])
    for position, target, size in zip(source, new, sizes, strict=True):
        _zero(file, end, target)
        _copy(file, position, target, size)
        end = target + size
    _zero(file, end, end + 8)  # up to the allocation table


def _copy(file: BinaryIO, source: int, target: int, size: int) -> None:
    file.seek(source)
    piece = file.read(size)
    file.seek(target)
    file.write(piece)


def _zero(file: BinaryIO, start: int, end: int) -> None:
    file.seek(start)
    block = bytes(1 << 20)
    for position in range(start, end, len(block)):
        file.write(block[: end - position])


def _field_table(with_labels: bool) -> np.ndarray:
    fields = _fields(with_labels)
    table = np.zeros(len(fields), _FIELD)
    table["type"] = [kind for _, kind, _ in fields]
    table["name"] = [name.encode() for name, _, _ in fields]
    return table


def _allocations(metadata: np.ndarray, image_sizes: np.ndarray, with_labels: bool) -> np.ndarray:
    """The allocation table that belongs to this metadata: for each sample its image, then its labels."""
    table = np.zeros((len(metadata), 2 if with_labels else 1), ALLOCATION)
    table["sample"] = np.arange(len(metadata), dtype=np.uint64)[:, None]
    table["position"][:, 0], table["size"][:, 0] = metadata["image"]["position"], image_sizes
    if with_labels:
        table["position"][:, 1], table["size"][:, 1] = metadata["labels"]["position"], metadata["labels"]["size"]
    return table.reshape(-1)


class Head(NamedTuple):
    """A file's header, and `total`, the file's actual size; positions and sizes in bytes."""

    total: int
    fields: int
    page: int
    samples: int
    alloc_table: int

    @property
    def metadata(self) -> int:
        """The position at which the metadata begins."""
        return _HEADER.itemsize + self.fields * _FIELD.itemsize


class ShardFile:
    """An open shard. Everything is read by `pread`, never mapped: a file that vanishes is an error, not a SIGBUS.

    Attributes (arrays have one entry a slot, (samples,)):
        samples: number of slots.
        height, width: int32, pixels.
        offset, size: int64, bytes; where the stored image lies in the file.
        label, uid: int64; label -1 for none.
        crc: uint32, crc32c of the stored image's bytes.
        raw: bool; whether the stored image is not a JPEG but raw pixels: height x width x 3 bytes, RGB, rows packed.
            Our writer never stores these; `vitscale.data.shards.foreign` reads files that have them.
        fields: names of the fields.
        fd: the file descriptor, for `os.pread`; valid until `close`.
        path: as given.
    """

    def __init__(self, path: str | Path, expected_bytes: int | None = None) -> None:
        """Open a shard and check its head. `expected_bytes` is the file's size according to the manifest.

        Raises DataError if it is missing, truncated, unfinished, damaged, or not a shard of ours.
        """
        self.path = Path(path)
        with os_errors(f"{self.path}: cannot be opened"):
            self.fd = regular(self.path, os.O_RDONLY)
        try:
            self._read_head(expected_bytes)
        except BaseException:
            self.close()
            raise

    def read(self, slot: int) -> bytes:
        """The stored bytes of a slot, not compared with `crc`. Raises DataError if the file has become shorter."""
        return self._pread(int(self.offset[slot]), int(self.size[slot]), f"image {slot}")

    @property
    def has_several_labels(self) -> bool:
        """Whether samples may have several labels, so that `label` is not all of them."""
        return self._labels is not None

    def labels(self, slot: int) -> np.ndarray | None:
        """All labels of a slot, int32 (n,), or None if the shard has one label a sample."""
        if self._labels is None:
            return None
        position, size = (int(value) for value in self._labels[slot])
        labels = np.frombuffer(self._pread(position, size, f"labels {slot}"), "<i4")
        return labels[:0] if labels.tolist() == [NO_LABEL] else labels

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.samples

    def _read_header(self, expected_bytes: int | None, smallest_page: int) -> Head:
        """The header, with the checks that need nothing else of the file."""
        total = os.fstat(self.fd).st_size
        if expected_bytes is not None:
            self._require(total == expected_bytes, f"a file of {total:,} bytes", f"{expected_bytes:,} bytes")
        self._require(total >= _HEADER.itemsize, f"a file of {total} bytes", "at least a header of 24 bytes")
        header = np.frombuffer(self._pread(0, _HEADER.itemsize, "header"), _HEADER)[0]
        version, page, samples = int(header["version"]), int(header["page_size"]), int(header["samples"])
        alloc_table = int(header["alloc_table"])
        self._require(version == _VERSION, f"format version {version}", f"{_VERSION}: is this a .beton file?")
        self._require(alloc_table != 0, "no allocation table: its writer did not finish", "a complete shard")
        self._require(
            smallest_page <= page <= MAX_PAGE_BYTES and page & (page - 1) == 0,
            f"a page size of {page:,}",
            f"a power of two from {smallest_page:,} to {MAX_PAGE_BYTES:,}",
        )
        self._require(samples > 0, "no samples", "at least one")
        return Head(total, int(header["fields"]), page, samples, alloc_table)

    def _read_fields(self, head: Head, count: int) -> np.ndarray:
        """The first `count` entries of the field table, dtype `_FIELD`."""
        size = count * _FIELD.itemsize
        self._require(
            _HEADER.itemsize + size <= head.total, f"a file of {head.total:,} bytes", f"a field table of {size:,} bytes"
        )
        return np.frombuffer(self._pread(_HEADER.itemsize, size, "field table"), _FIELD)

    def _read_metadata(self, head: Head, kind: np.dtype) -> np.ndarray:
        self._require(
            head.metadata + head.samples * kind.itemsize <= head.alloc_table <= head.total,
            f"{head.samples:,} samples and an allocation table at byte {head.alloc_table:,} of {head.total:,}",
            "the metadata before it, and it inside the file",
        )
        return np.frombuffer(self._pread(head.metadata, head.samples * kind.itemsize, "metadata"), kind)

    def _read_allocations(self, head: Head, pieces: int) -> np.ndarray:
        return np.frombuffer(
            self._pread(head.alloc_table, pieces * ALLOCATION.itemsize, "allocation table"), ALLOCATION
        )

    def _read_head(self, expected_bytes: int | None) -> None:
        head = self._read_header(expected_bytes, DEFAULT_PAGE_BYTES)
        with_labels = head.fields == len(_FIELDS) + 1
        fields = _field_table(with_labels)
        found = self._read_fields(head, len(fields))
        names = [bytes(name).decode("ascii", "replace") for name in found["name"]]
        self._require(
            head.fields == len(fields) and bool(np.all(found[["type", "name"]] == fields[["type", "name"]])),
            f"{head.fields} fields ({', '.join(names)})",
            f"{', '.join(field_names(with_labels))} of FFCV's types; other .beton files need `vitscale shards adopt`",
        )
        metadata = self._read_metadata(head, _metadata_type(with_labels))
        pieces = head.samples * (2 if with_labels else 1)
        self._require(
            head.total - head.alloc_table == pieces * ALLOCATION.itemsize,
            f"an allocation table of {head.total - head.alloc_table:,} bytes",
            f"{pieces * ALLOCATION.itemsize:,} for {head.samples} samples",
        )
        table = self._read_allocations(head, pieces)
        self._check_samples(metadata, table, with_labels, head)

        image = metadata["image"]
        self.samples = head.samples
        self.fields = field_names(with_labels)
        self.height, self.width = image["height"].astype(np.int32), image["width"].astype(np.int32)
        self.offset = image["position"].astype(np.int64)
        self.size = table["size"][:: 2 if with_labels else 1].astype(np.int64)
        self.label, self.uid = metadata["label"].astype(np.int64), metadata["uid"].astype(np.int64)
        self.crc = metadata["crc"].astype(np.uint32)
        self.raw = np.zeros(head.samples, bool)
        self._labels: np.ndarray | None = metadata["labels"].copy() if with_labels else None

    def _check_samples(self, metadata: np.ndarray, table: np.ndarray, with_labels: bool, head: Head) -> None:
        """Check that metadata and allocation table are possible and agree. Raises DataError if not."""
        first_byte, end, page = head.metadata + metadata.nbytes, head.alloc_table, head.page
        image_sizes = table["size"][:: 2 if with_labels else 1]
        image = metadata["image"]
        position, size = table["position"], table["size"]
        # Unsigned sums may wrap, but not for a piece that starts inside the file and is no longer than it.
        inside = (position >= first_byte) & (position < end) & (size > 0) & (size <= end) & (position + size <= end)
        bad = {
            "an image that is no JPEG": image["mode"] != MODE_JPEG,
            "an image without height or width": (image["height"] == 0) | (image["width"] == 0),
            "a label below -1": metadata["label"] < NO_LABEL,
            "a negative uid": metadata["uid"] < 0,
            "a crc beyond 32 bits": (metadata["crc"] < 0) | (metadata["crc"] >> 32 != 0),
            "an allocation that contradicts the metadata": table != _allocations(metadata, image_sizes, with_labels),
            "a piece outside the pages": ~inside,
            "a piece across two pages": position // page != (position + size - 1) // page,
            "overlapping pieces": position[1:] < position[:-1] + size[:-1],
            "labels that are no int32": (metadata["labels"]["size"] % 4 != 0) if with_labels else np.zeros(1, bool),
        }
        self._refuse(bad)

    def _refuse(self, bad: dict[str, np.ndarray]) -> None:
        """Raise DataError if any of these masks is True anywhere; the keys say what is wrong there."""
        for what, where in bad.items():
            if where.any():
                raise DataError(f"{self.path}: damaged: {what}, in {int(where.sum()):,} of {len(where):,} places")

    def _require(self, holds: bool, found: str, expected: str) -> None:
        if not holds:
            raise DataError(f"{self.path}: damaged or not a shard: found {found}; expected {expected}")

    def _pread(self, position: int, size: int, what: str) -> bytes:
        parts: list[bytes] = []
        done = 0
        while done < size:  # one call reads at most 2 GiB, and less on some network file systems
            try:
                part = os.pread(self.fd, size - done, position + done)
            except OSError as error:
                raise DataError(f"{self.path}: {what} cannot be read ({error.strerror})") from error
            if not part:
                raise DataError(f"{self.path}: {what} ends after {done:,} bytes; expected {size:,}")
            parts.append(part)
            done += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
