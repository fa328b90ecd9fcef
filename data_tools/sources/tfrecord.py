"""TFRecord files of `tf.train.Example`, read without TensorFlow; local ones with random access.

    record:   length u64, masked crc32c of these 8 bytes, data, masked crc32c of the data; integers little-endian
    Example:  { features = 1: { feature = 1: map { key = 1: string, value = 2: Feature } } }
    Feature:  { bytes_list = 1 | float_list = 2 | int64_list = 3: { value = 1: repeated } }

Facts of the formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/feature.proto and protobuf's
description of its encoding.

Of the common feature names, the first that the first record has is used for all records; class names come before
numbers. In particular `image/class/label` of TensorFlow's own ImageNet conversion counts from 1, which is why
`image/class/synset` comes before it.
"""

import io
import posixpath
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from data_tools.sources.parts import is_gzip, open_part, part_names, reading, unpacked
from data_tools.sources.source import RANGE, Item, SourceOptions, numbered_label, read_range
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.images import crc32c
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted

_IMAGES = ("image/encoded", "image", "image_raw", "jpg", "jpeg", "png")
_LABELS = ("image/class/synset", "image/class/label", "label", "labels", "image/class/text", "class", "cls", "target")
_NAMES = ("image/filename", "file_name", "filename")
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
        size = _size(head, spot)
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
        rest = _size(head, f"{where}: record {number}") + _CRC.size
        if file.seekable():
            file.seek(rest, io.SEEK_CUR)
        else:  # compressed
            file.read(rest)
        number += 1
    return number


def _size(head: bytes, spot: str) -> int:
    size: int = _LENGTH.unpack(head)[0]
    if size > _MAX_RECORD_BYTES:
        raise DataError(f"{spot}: {size:,} bytes; at most {_MAX_RECORD_BYTES:,} are possible")
    return size


def parse_example(data: bytes, where: str) -> dict[str, Feature]:
    """The features of an Example by name; of equal names the last. Raises DataError for data that is not an Example."""
    return dict(
        _entry(data, entry, where)
        for features in _values_at(data, (0, len(data)), where, 10)
        for entry in _values_at(data, features, where)
    )


def bytes_values(data: bytes, feature: Feature, where: str) -> list[Span]:
    """The spans of the values of a bytes feature."""
    most = _MOST_VALUES // max(len(feature.lists), 1)
    return [value for span in feature.lists for value in _values_at(data, span, where, most)]


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
            feature = _parsed_feature(data, (start, end), where)
    return name, feature


def _parsed_feature(data: bytes, span: Span, where: str) -> Feature:
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


def _values_at(data: bytes, span: Span, where: str, most: int = 1000) -> Iterator[Span]:
    """The spans of the values of field 1, a text or a message, of the message in `span`."""
    return (value for number, kind, value in _fields(data, span, where, most) if (number, kind) == (1, _DELIMITED))


def _varint(data: bytes, start: int, end: int, where: str) -> tuple[int, int]:
    """The 64-bit number at `start`, and where it ends."""
    value = 0
    for shift, position in enumerate(range(start, min(end, start + 10))):
        byte = data[position]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + 1
    raise DataError(f"{where}: not a tf.train.Example (a number at byte {start} of the record without end)")


@dataclass(frozen=True)
class LabelRule:
    """Computes a label that an example does not state from its other features.

    `label` is a function of their values, each a flat array, that returns the class number and raises ValueError if
    there is none. Must be a module-level function, because it is pickled for workers.
    """

    features: tuple[str, ...]  # by TensorFlow Datasets' names: `label`, `objects/pixel_coords`
    label: Callable[..., int]

    def labels(self, values: Mapping[str, np.ndarray], spot: str) -> tuple[str, ...]:
        """The label of one example, as an Item has it. Raises DataError, which names `spot`."""
        missing = [name for name in self.features if name not in values]
        if missing:
            raise DataError(f"{spot}: no feature {', '.join(missing)}, from which the label follows")
        try:
            return (str(self.label(*(values[name] for name in self.features))),)
        except (ValueError, IndexError) as error:  # IndexError: per-object features that differ in length
            raise DataError(f"{spot}: {error}") from error


@dataclass(frozen=True)
class TFRecordSource:
    """Images in TFRecord files. Content is the image's place in its file, or the image itself if any file streams."""

    parts: tuple[str, ...]
    names: tuple[str, ...]  # the beginning of the keys of each file's images
    streams: bool
    image: str  # names of the features; no `label` for images without labels
    label: str | None
    class_names: tuple[str, ...] | None = None
    rule: LabelRule | None = None  # computes the labels instead

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        where = self.parts[part]
        with reading(where), closing(open_records(where)) as file:
            for number, position, data in read_records(file, where):
                spot = f"{where}: record {number} at byte {position - _LENGTH.size:,}"
                features = parse_example(data, spot)
                start, end = _image(data, features, self.image, spot)
                if self.rule is not None:
                    labels = self.rule.labels(_values(data, features, self.rule.features, spot), spot)
                else:
                    labels = () if self.label is None else _labels(data, features, self.label, spot)
                key = f"{self.names[part]}/{number:09d}{_file_name(data, features, spot)}"
                content = data[start:end] if self.streams else RANGE.pack(position + start, end - start)
                yield Item(key, labels, content)

    def read(self, part: int, content: bytes) -> bytes:
        return content if self.streams else read_range(self.parts[part], content, "file")


def open_tfrecords(src: str, files: Sequence[str], options: SourceOptions) -> TFRecordSource:
    """TFRecord files, plain or compressed with gzip. The features are chosen by the first record.

    Raises:
        RecipeError: features that are unknown.
        DataError, StorageError: a file that is damaged at its beginning, or that cannot be read.
    """
    names = part_names(files)
    streams = False
    for where in files:
        with reading(where), closing(open_part(where)) as file:
            streams = streams or is_url(where) or _is_compressed(file)
    for where in files:  # the first file with a record: empty files are common
        with reading(where), closing(open_records(where)) as file:
            first = next(read_records(file, where), None)
            if first is not None:
                image, label = _choose(list(parse_example(first.data, f"{where}: record 0")), options, where)
                return TFRecordSource(tuple(files), names, streams, image, label)
    raise DataError(f"{src}: no records")


def open_records(where: str) -> io.BufferedReader:
    """A file of records, decompressed if need be. Raises as `open_part`."""
    file = open_part(where)
    return unpacked(where, file) if _is_compressed(file) else file


def _is_compressed(file: io.BufferedReader) -> bool:
    # A first record's length may look like gzip's magic number; its checksum tells them apart.
    return is_gzip(file) and not is_record_head(file.peek(_LENGTH.size)[: _LENGTH.size])


def _choose(found: Sequence[str], options: SourceOptions, where: str) -> tuple[str, str | None]:
    def named(wanted: str | None, common: tuple[str, ...], what: str, flags: str) -> str:
        name = next((name for name in (common if wanted is None else (wanted,)) if name in found), None)
        if name is None:
            missing = f"no feature {wanted!r}" if wanted is not None else f"no feature that is known as the {what}"
            there = f"the first record has {', '.join(sorted(found)) or 'none'}"
            raise RecipeError(f"{where}: {missing}; {there}. Say which: {flags}")
        return name

    image = named(options.image_field, _IMAGES, "image", "--image-field NAME")
    if options.unlabelled:
        return image, None
    return image, named(options.label_field, _LABELS, "label", "--label-field NAME, or --unlabelled")


def _image(data: bytes, features: dict[str, Feature], name: str, spot: str) -> Span:
    feature = _feature(features, name, spot)
    values = bytes_values(data, feature, spot) if feature.kind == "bytes" else []
    if len(values) != 1:
        held = counted(len(values), "value") if feature.kind == "bytes" else feature.kind or "nothing"
        raise DataError(f"{spot}: feature {name!r} holds {held}; expected the bytes of one image")
    return values[0]


def _labels(data: bytes, features: dict[str, Feature], name: str, spot: str) -> tuple[str, ...]:
    feature = _feature(features, name, spot)
    if feature.kind == "floats":
        raise DataError(f"{spot}: feature {name!r} holds floats; expected numbers or names of classes")
    labels: dict[str, None] = {}
    if feature.kind == "ints":
        for value in int_values(data, feature, spot):
            labels.update(dict.fromkeys(numbered_label(value, spot)))
    else:
        for start, end in bytes_values(data, feature, spot):
            if end > start:
                labels[_text(data[start:end])] = None
    return tuple(labels)


def _values(data: bytes, features: dict[str, Feature], names: Sequence[str], spot: str) -> dict[str, np.ndarray]:
    """The numbers of the named features that the record has, each (n,)."""
    found: dict[str, np.ndarray] = {}
    for name in names:
        feature = features.get(name)
        if feature is not None and feature.kind == "floats":
            found[name] = float_values(data, feature, spot)
        elif feature is not None and (feature.kind != "bytes" or not bytes_values(data, feature, spot)):
            found[name] = np.array(int_values(data, feature, spot), np.int64)
    return found


def _feature(features: dict[str, Feature], name: str, spot: str) -> Feature:
    if name not in features:
        raise DataError(f"{spot}: no feature {name!r}, which the first record has; found {', '.join(sorted(features))}")
    return features[name]


def _file_name(data: bytes, features: dict[str, Feature], spot: str) -> str:
    """The suffix that the image's file name adds to the key; empty if the record has no file name."""
    for name in _NAMES:
        if name in features and features[name].kind == "bytes":
            values = bytes_values(data, features[name], spot)
            text = posixpath.basename(_text(data[slice(*values[0])])) if values else ""
            return f"/{text}" if text not in ("", ".", "..") else ""
    return ""


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
