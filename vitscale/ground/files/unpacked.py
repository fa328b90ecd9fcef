"""How far compressed files may grow: a kilobyte of a stranger's can ask for all memory or fill the disk."""

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from vitscale.ground.errors import DataError

if TYPE_CHECKING:  # it takes a while to import, and only files of its own need it
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROOM, _MOST_GROWTH = 32 << 20, 50
_MOST_ROWS = 1 << 17  # and one for each byte of the file
_MOST_VALUES = 1 << 20  # of a column in a row group, likewise
_MOST_PAGE = 1 << 31
_BATCH_BYTES = 64 << 20
_SMALL_PICTURE, _MOST_PIXELS_A_BYTE = 1 << 24, 180
CHECKS: dict[str, Any] = {
    "page_checksum_verification": True,
    "thrift_string_size_limit": 64 << 20,
    "thrift_container_size_limit": 1 << 17,
}
"""How pyarrow opens a stranger's parquet file."""


def refuse_growth(where: str, packed: int, unpacked: int) -> None:
    """Raise DataError if so many bytes have become more than images do: photos hardly compress."""
    if unpacked > _ROOM + _MOST_GROWTH * packed:
        raise DataError(
            f"{where}: its {packed:,} bytes unpack to {unpacked:,} or more, which looks like an attack. If they are "
            "what you expect, unpack them to files first"
        )


def most_pixels(packed: int) -> int:
    """Pixels that an image file of so many bytes may have: to decode one takes up to 27 bytes, and none in the file."""
    return max(_SMALL_PICTURE, _MOST_PIXELS_A_BYTE * packed)


def read_batches(
    raw: BinaryIO,
    file: "pq.ParquetFile",
    where: str,
    rows: int,
    columns: Sequence[str] | None = None,
    row_groups: Sequence[int] | None = None,
) -> "Iterator[pa.RecordBatch]":
    """Batches of at most so many rows of a parquet file, fewer if pages are large. Raises DataError, and as pyarrow.

    Of a small file all page headers are read first: the footer's sizes are only claims.
    """
    size = raw.seek(0, io.SEEK_END)
    if file.metadata.num_rows > _MOST_ROWS + size:
        raise DataError(f"{where}: claims {file.metadata.num_rows:,} rows in {size:,} bytes")
    largest = 1
    if _ROOM + _MOST_GROWTH * size < _MOST_PAGE:  # else no page can be too large
        raw.seek(0)
        largest = max([1, *_page_sizes(io.BytesIO(raw.read()), where, size)])
    unpacked = 0
    rows = max(1, min(rows, _BATCH_BYTES // largest))
    for batch in file.iter_batches(rows, row_groups, columns, use_threads=False):
        unpacked += batch.nbytes
        refuse_growth(where, size, unpacked)
        yield batch


def _page_sizes(content: io.BytesIO, where: str, size: int) -> Iterator[int]:
    try:
        content.seek(-8, io.SEEK_END)
        footer = int.from_bytes(content.read(4), "little")
        content.seek(-8 - footer, io.SEEK_END)
        # Not by pyarrow, which ends the process over some footers.
        columns = [column[3] for group in _fields(content).get(4, ()) for column in group[1]]
        seen = 0  # bytes, of pages that may overlap in an attack
        for column in columns:
            position = min(start for start in (column[9], column.get(11)) if start)
            end, values = position + column[7], 0
            while position < end:
                content.seek(position)
                page = _fields(content)
                unpacked, packed, head = page[2], page[3], page.get(5, page.get(8, {1: 0}))  # of values, as of 2 kinds
                values += head[1]
                seen += content.tell() - position + packed
                if min(packed, unpacked, values) < 0 or values > _MOST_VALUES + size or seen > size:
                    raise ValueError
                refuse_growth(where, size, unpacked)
                yield unpacked
                position = content.tell() + packed
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{where}: damaged, or an attack: its pages are not those of {size:,} bytes") from None


def _fields(stream: io.BytesIO) -> dict[int, Any]:
    """The numbers, structures and lists of these, by field number, of a structure in Thrift's compact protocol."""
    found: dict[int, Any] = {}
    number = 0
    while head := stream.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _signed(stream)
        kind = head & 15
        found[number] = _value(stream, kind) if kind > 2 else kind == 1
    return found


def _value(stream: io.BytesIO, kind: int) -> Any:
    if kind in (4, 5, 6):  # integers
        return _signed(stream)
    if kind == 8:  # bytes
        return stream.seek(_varint(stream), io.SEEK_CUR)
    if kind == 9:  # a list
        head = stream.read(1)[0]
        return [_value(stream, head & 15) for _ in range(head >> 4 if head < 0xF0 else _varint(stream))]
    if kind == 12:
        return _fields(stream)
    stream.seek(8 if kind == 7 else 1, io.SEEK_CUR)  # a double; a byte
    if kind not in (1, 2, 3, 7) or stream.tell() > len(stream.getbuffer()):
        raise ValueError
    return None


def _signed(stream: io.BytesIO) -> int:
    value = _varint(stream)
    return value >> 1 ^ -(value & 1)


def _varint(stream: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte: int = stream.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value
