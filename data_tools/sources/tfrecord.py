"""TFRecord files of `tf.train.Example`, read without TensorFlow; local ones with random access.

Of the common feature names, the first that the first record has is used for all records; class names come before
numbers. In particular `image/class/label` of TensorFlow's own ImageNet conversion counts from 1, which is why
`image/class/synset` comes before it.
"""

import errno
import io
import posixpath
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.sources.fields import NO_LABELS
from data_tools.sources.label_rule import LabelRule
from data_tools.sources.parts import is_gzip, open_part, part_names, reading, unpacked
from data_tools.sources.source import Item, SourceOptions, numbered_label
from data_tools.sources.tf_example import (
    Feature,
    Span,
    bytes_values,
    float_values,
    int_values,
    is_record_head,
    parse_example,
    read_records,
)
from vitscale.data.shards.images import refuse_too_large
from vitscale.ground.errors import DataError, RecipeError
from vitscale.ground.storage import is_url
from vitscale.ground.wording import counted

_IMAGES = ("image/encoded", "image", "image_raw", "jpg", "jpeg", "png")
_LABELS = ("image/class/synset", "image/class/label", "label", "labels", "image/class/text", "class", "cls", "target")
_NAMES = ("image/filename", "file_name", "filename")
_PLACE = struct.Struct("<QQ")  # position in the file, size
_HEAD_BYTES = 12


@dataclass(frozen=True)
class TFRecordSource:
    """Images in TFRecord files. Content is the image's place in its file, or the image itself if any file streams.

    Attributes:
        names: the beginning of the keys of each file's images.
        image, label: names of the features; `label` is None for images without labels.
        rule: if given, computes the labels instead.
    """

    parts: tuple[str, ...]
    names: tuple[str, ...]
    streams: bool
    image: str
    label: str | None
    class_names: tuple[str, ...] | None = None
    rule: LabelRule | None = None

    def items(self, part: int, ignored: Counter[str]) -> Iterator[Item]:
        where = self.parts[part]
        with reading(where), closing(open_records(where)) as file:
            for number, position, data in read_records(file, where):
                spot = f"{where}: record {number} at byte {position - _HEAD_BYTES:,}"
                features = parse_example(data, spot)
                start, end = _image(data, features, self.image, spot)
                if self.rule is not None:
                    labels = self.rule.labels(_values(data, features, self.rule.features, spot), spot)
                else:
                    labels = () if self.label is None else _labels(data, features, self.label, spot)
                key = f"{self.names[part]}/{number:09d}{_file_name(data, features, spot)}"
                content = data[start:end] if self.streams else _PLACE.pack(position + start, end - start)
                yield Item(key, labels, content)

    def read(self, part: int, content: bytes) -> bytes:
        if self.streams:
            return content
        position, size = _PLACE.unpack(content)
        refuse_too_large(size)
        with Path(self.parts[part]).open("rb", buffering=0) as file:
            file.seek(position)
            data = file.read(size)
        if data is None or len(data) != size:
            raise OSError(errno.EIO, "the file has become shorter", self.parts[part])
        return data


def open_tfrecords(src: str, files: Sequence[str], options: SourceOptions) -> TFRecordSource:
    """TFRecord files, plain or compressed with gzip. The features are chosen by the first record found.

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
                found = list(parse_example(first.data, f"{where}: record 0"))
                image, label = _choose(found, options, where)
                return TFRecordSource(tuple(files), names, streams, image, label)
    raise DataError(f"{src}: no records")


def open_records(where: str) -> io.BufferedReader:
    """A file of records, decompressed if need be. Raises as `open_part`."""
    file = open_part(where)
    return unpacked(where, file) if _is_compressed(file) else file


def _is_compressed(file: io.BufferedReader) -> bool:
    # A first record's length may look like gzip's magic number; its checksum tells them apart.
    return is_gzip(file) and not is_record_head(file.peek(_HEAD_BYTES)[:_HEAD_BYTES])


def _choose(found: Sequence[str], options: SourceOptions, where: str) -> tuple[str, str | None]:
    """The names of the image and label features."""
    chosen: list[str | None] = []
    for wanted, common, what, flags in (
        (options.image_field, _IMAGES, "image", "--image-field NAME"),
        (options.label_field, _LABELS, "label", f"--label-field NAME, or --label-field {NO_LABELS}"),
    ):
        there = f"the first record has {', '.join(sorted(found)) or 'none'}"
        if wanted == NO_LABELS and common is _LABELS and wanted not in found:
            chosen.append(None)
            continue
        name = wanted if wanted in found else None
        if wanted is None:
            name = next((name for name in common if name in found), None)
        if name is None:
            missing = f"no feature {wanted!r}" if wanted is not None else f"no feature that is known as the {what}"
            raise RecipeError(f"{where}: {missing}; {there}. Say which: {flags}")
        chosen.append(name)
    image, label = chosen
    assert image is not None
    return image, label


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
