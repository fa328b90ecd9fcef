"""TensorFlow's two formats without TensorFlow: records in a file, and the `tf.train.Example` in a record.

    record:   length u64, masked crc32c of these 8 bytes, data, masked crc32c of the data; integers little-endian
    Example:  { features = 1: { feature = 1: map { key = 1: string, value = 2: Feature } } }
    Feature:  { bytes_list = 1 | float_list = 2 | int64_list = 3: { value = 1: repeated } }

Only the requested features of a record are parsed. Facts of the formats: tensorflow/core/lib/io/record_writer.h,
tensorflow/core/example/feature.proto and protobuf's description of its encoding.
"""

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from vitscale.ground.errors import DataError
from vitscale.ground.images import crc32c

# What protobuf itself allows for one message; a larger length would fill the memory before it is found to be wrong.
_MAX_RECORD_BYTES = 2 << 30
_MOST_VALUES = 1 << 20  # of a feature
_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "bytes", 2: "floats", 3: "ints"}

Span = tuple[int, int]  # start and end within the record


class Record(NamedTuple):
    """A record, its number in the file, and the byte at which its data begins."""

    number: int
    position: int
    data: bytes


class Feature(NamedTuple):
    """The kind of a feature's values (bytes, floats or ints; None for an empty feature), and the spans of its lists."""

    kind: str | None
    lists: tuple[Span, ...]


def is_record_head(head: bytes) -> bool:
    """Whether `head`, the first bytes of a file, begins a record."""
    return len(head) >= _LENGTH.size and _masked(head[:8]) == _LENGTH.unpack_from(head)[1]


def read_records(file: BinaryIO, where: str) -> Iterator[Record]:
    """The records of an open file, all checksums verified. Raises DataError for damage."""
    number = position = 0
    while head := file.read(_LENGTH.size):
        spot = f"{where}: record {number} at byte {position:,}"
        if len(head) < _LENGTH.size:
            raise DataError(f"{spot}: truncated")
        if not is_record_head(head):
            what = "this is no TFRecord file" if number == 0 else "the file is damaged"
            raise DataError(f"{spot}: the checksum of its length is wrong: {what}")
        size = _LENGTH.unpack(head)[0]
        if size > _MAX_RECORD_BYTES:
            raise DataError(f"{spot}: {size:,} bytes; at most {_MAX_RECORD_BYTES:,} are possible")
        data = file.read(size)
        tail = file.read(_CRC.size)
        if len(data) < size or len(tail) < _CRC.size:
            raise DataError(f"{spot}: truncated: {len(data):,} of {size:,} bytes")
        if _CRC.unpack(tail)[0] != _masked(data):
            raise DataError(f"{spot}: the checksum of its data is wrong: the file is damaged")
        yield Record(number, position + _LENGTH.size, data)
        number += 1
        position += _LENGTH.size + size + _CRC.size


def count_records(file: BinaryIO, where: str) -> int:
    """The number of records in an open file, from their lengths alone. Raises DataError for a damaged length."""
    number = 0
    while head := file.read(_LENGTH.size):
        if not is_record_head(head):
            raise DataError(f"{where}: record {number}: the checksum of its length is wrong: the file is damaged")
        file.seek(_LENGTH.unpack(head)[0] + _CRC.size, io.SEEK_CUR)
        number += 1
    return number


def parse_example(data: bytes, where: str) -> dict[str, Feature]:
    """The features of an Example by name; of equal names the last. Raises DataError for data that is not an Example."""
    found = {}
    for number, kind, features in _fields(data, (0, len(data)), where, 10):
        if (number, kind) == (1, _DELIMITED):
            for entry_number, entry_kind, entry in _fields(data, features, where):
                if (entry_number, entry_kind) == (1, _DELIMITED):
                    name, feature = _entry(data, entry, where)
                    found[name] = feature
    return found


def bytes_values(data: bytes, feature: Feature, where: str) -> list[Span]:
    """The spans of the values of a bytes feature."""
    return [
        value
        for span in feature.lists
        for number, kind, value in _fields(data, span, where, _MOST_VALUES // len(feature.lists))
        if (number, kind) == (1, _DELIMITED)
    ]


def int_values(data: bytes, feature: Feature, where: str) -> list[int]:
    """The values of an int64 feature, packed or not."""
    values = []
    for span in feature.lists:
        for number, kind, (start, end) in _fields(data, span, where, _MOST_VALUES // len(feature.lists)):
            if (number, kind) == (1, _VARINT):
                values.append(_varint(data, start, end, where)[0])
            elif (number, kind) == (1, _DELIMITED):
                if end - start > 2 * _MOST_VALUES:
                    raise DataError(f"{where}: {end - start:,} bytes of numbers, which no label is")
                while start < end:
                    value, start = _varint(data, start, end, where)
                    values.append(value)
    return [value - (1 << 64) if value >= 1 << 63 else value for value in values]


def float_values(data: bytes, feature: Feature, where: str) -> np.ndarray:
    """The values of a float feature, packed or not: float32 (n,)."""
    found = b"".join(
        data[slice(*value)]
        for span in feature.lists
        for number, kind, value in _fields(data, span, where, _MOST_VALUES // len(feature.lists))
        if number == 1 and kind in (_FIXED32, _DELIMITED)
    )
    if len(found) % 4:
        raise DataError(f"{where}: not a tf.train.Example (floats of {len(found)} bytes)")
    return np.frombuffer(found, "<f4")


def _masked(data: bytes) -> int:
    """crc32c as TFRecord stores it: rotated and shifted, since the crc of data ending in its own crc is a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(data: bytes, span: Span, where: str) -> tuple[str, Feature]:
    name, feature = "", Feature(None, ())
    for number, kind, (start, end) in _fields(data, span, where):
        if (number, kind) == (1, _DELIMITED):
            name = data[start:end].decode("utf-8", "backslashreplace")
        elif (number, kind) == (2, _DELIMITED):
            feature = _feature(data, (start, end), where)
    return name, feature


def _feature(data: bytes, span: Span, where: str) -> Feature:
    held: str | None = None
    lists: list[Span] = []
    for number, kind, values in _fields(data, span, where):
        if number not in _KINDS or kind != _DELIMITED:
            continue
        if _KINDS[number] != held:  # a oneof: the last kind wins, and its lists are joined
            held, lists = _KINDS[number], []
        lists.append(values)
    return Feature(held, tuple(lists))


def _fields(data: bytes, span: Span, where: str, most: int = 1000) -> Iterator[tuple[int, int, Span]]:
    """(number, wire type, span of the value) of every field of the message in `span`."""
    start, end = span
    count = 0
    while start < end:
        if (count := count + 1) > most:
            raise DataError(f"{where}: not a tf.train.Example (more than {most:,} fields in one message)")
        tag, start = _varint(data, start, end, where)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            following = _varint(data, start, end, where)[1]
        elif kind == _DELIMITED:
            size, start = _varint(data, start, end, where)
            following = start + size
        elif kind == _FIXED64:
            following = start + 8
        elif kind == _FIXED32:
            following = start + 4
        else:
            raise DataError(f"{where}: not a tf.train.Example (wire type {kind} at byte {start} of the record)")
        if following > end or number == 0:
            raise DataError(f"{where}: not a tf.train.Example (a field at byte {start} of the record that cannot be)")
        yield number, kind, (start, following)
        start = following


def _varint(data: bytes, start: int, end: int, where: str) -> tuple[int, int]:
    """The 64-bit number at `start`, and where it ends."""
    value = 0
    for shift, position in enumerate(range(start, min(end, start + 10))):
        byte = data[position]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + 1
    raise DataError(f"{where}: not a tf.train.Example (a number at byte {start} of the record without end)")
