"""How far compressed files may grow: a kilobyte of a stranger's can ask for all memory or fill the disk."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from vitscale.errors import DataError

_ROOM, _MOST_GROWTH = 32 << 20, 50
_MOST_ROWS = 1 << 17  # and one for each byte of the file
_MOST_VALUES = 1 << 22  # of a column in a row group, likewise
_MOST_PAGE = 1 << 31
_BATCH_BYTES = 64 << 20
_SHORTS, _BINARY, _STRUCT = (4, 5, 6), 8, 12  # of Thrift's compact protocol
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


def read_batches(
    raw: BinaryIO,
    file: pq.ParquetFile,
    where: str,
    rows: int,
    columns: Sequence[str] | None = None,
    row_groups: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of at most so many rows of a parquet file, fewer if pages are large. Raises DataError, and as pyarrow.

    Of a small file all page headers are read first: the footer's sizes are only claims.
    """
    size = raw.seek(0, io.SEEK_END)
    if file.metadata.num_rows > _MOST_ROWS + size:
        raise DataError(f"{where}: claims {file.metadata.num_rows:,} rows in {size:,} bytes")
    largest = 1
    if _ROOM + _MOST_GROWTH * size < _MOST_PAGE:  # else no page can be too large
        raw.seek(0)
        largest = max([1, *_page_sizes(io.BytesIO(raw.read()), file.metadata, where, size)])
    unpacked = 0
    rows = max(1, min(rows, _BATCH_BYTES // largest))
    for batch in file.iter_batches(rows, row_groups, columns, use_threads=False):
        unpacked += batch.nbytes
        refuse_growth(where, size, unpacked)
        yield batch


def _page_sizes(content: BinaryIO, metadata: pq.FileMetaData, where: str, size: int) -> Iterator[int]:
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            starts = [start for start in (column.dictionary_page_offset, column.data_page_offset) if start]
            position, values = min(starts, default=0), 0
            end = position + column.total_compressed_size
            while position < end:
                try:
                    content.seek(position)
                    page = _fields(content)
                    values += page.get(5, page.get(8, {1: 0}))[1]  # of the header of either kind of data page
                    packed, unpacked = page[3], page[2]
                    if min(packed, unpacked, values) < 0 or values > _MOST_VALUES + size:
                        raise ValueError("impossible sizes")
                except (LookupError, ValueError, TypeError, AttributeError, RecursionError):
                    raise DataError(f"{where}: damaged, or an attack: the page at byte {position:,}") from None
                refuse_growth(where, size, unpacked)
                yield unpacked
                position = content.tell() + packed


def _fields(stream: BinaryIO) -> dict[int, Any]:
    """The numbers and inner structures, by field number, of a structure in Thrift's compact protocol."""
    found: dict[int, Any] = {}
    number = 0
    while head := stream.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _signed(stream)
        kind = head & 15
        if kind in _SHORTS:
            found[number] = _signed(stream)
        elif kind == _STRUCT:
            found[number] = _fields(stream)
        elif kind == _BINARY:
            stream.seek(_varint(stream), io.SEEK_CUR)
        elif kind not in (1, 2):  # true and false
            raise ValueError("no page's header has such a field")
    return found


def _signed(stream: BinaryIO) -> int:
    value = _varint(stream)
    return value >> 1 ^ -(value & 1)


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte: int = stream.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value
