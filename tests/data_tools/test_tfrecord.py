import gzip
import io
import struct

import google_crc32c
import pytest
from datasets_on_disk import items_of
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from small_files import upload
from tensorboard.summary.writer.record_writer import RecordWriter

from data_tools.sources.source import Item, SourceOptions
from data_tools.sources.tfrecord import (
    bytes_values,
    count_records,
    int_values,
    open_records,
    open_tfrecords,
    parse_example,
)
from vitscale.ground.errors import DataError, RecipeError

PROTO = """
name: "example.proto" package: "tf" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type {
  name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 options { packed: PACKED } }
}
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tf.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tf.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tf.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".tf.Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true } field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tf.Feature" }
  }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tf.Features" } }
"""


def example_class(packed: bool = True):
    """tf.train.Example as its .proto files describe it, built by protobuf itself; int64 packed or not."""
    pool, packing = descriptor_pool.DescriptorPool(), PROTO.replace("PACKED", str(packed).lower())
    pool.Add(text_format.Parse(packing, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


Example = example_class()


def encode(example=Example, **features) -> bytes:
    """An Example of lists of bytes, texts, whole numbers or floats; __ in a name stands for /."""
    made = example()
    for name, values in features.items():
        feature = made.features.feature[name.replace("__", "/")]
        if values and isinstance(values[0], int):
            feature.int64_list.value.extend(values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.bytes_list.value.extend(v.encode() if isinstance(v, str) else v for v in values)
    return made.SerializeToString()


def framed(*records: bytes) -> bytes:
    out = io.BytesIO()
    writer = RecordWriter(out)
    for record in records:
        writer.write(record)
    return out.getvalue()


def open_files(*files: str, image=None, label=None, **others):
    return open_tfrecords("source", files, SourceOptions(image_field=image, label_field=label, **others))


def listed(*files: str, **fields) -> list[Item]:
    return items_of(open_files(*files, **fields))


def write(path, *records: bytes) -> str:
    path.write_bytes(framed(*records))
    return str(path)


RECORDS = [
    encode(
        image__encoded=[b"first"], image__class__label=[1], image__class__synset=["n01"], image__filename=["a/1.JPEG"]
    ),
    encode(image__encoded=[b"second" * 5000], image__class__label=[2], image__class__synset=["n02"], x=[0.5, 1.5]),
]
EXPECTED = [("train-0/000000000/1.JPEG", ("n01",), b"first"), ("train-0/000000001", ("n02",), b"second" * 5000)]


@pytest.mark.parametrize("kind", ["plain", "gzip", "remote", "remote gzip", "one of two"])
def test_what_streams(tmp_path, kind):
    content = framed(*RECORDS)
    path = tmp_path / "train-0"
    path.write_bytes(gzip.compress(content) if "gzip" in kind or kind == "one of two" else content)
    files = [str(path)]
    if "remote" in kind:
        files = [upload(path, "memory://records/train-0")]
    if kind == "one of two":
        files.append(write(tmp_path / "train-1", *RECORDS))
    assert open_files(*files).streams == (kind != "plain")
    assert listed(*files)[:2] == EXPECTED


def test_a_record_that_looks_like_gzip(tmp_path):
    size = int.from_bytes(b"\x1f\x8b\x08", "little")
    empty = len(encode(image=[b"x" * 500_000], label=[7])) - 500_000
    file = write(tmp_path / "x", encode(image=[b"x" * (size - empty)], label=[7]))
    assert (tmp_path / "x").read_bytes().startswith(b"\x1f\x8b\x08")
    assert [item.labels for item in listed(file)] == [("7",)]


@pytest.mark.parametrize("packed", [True, False])
def test_features_as_protobuf_encodes_them(packed):
    numbers = [0, 1, -1, 127, 128, 2**63 - 1, -(2**63)]
    data = encode(example_class(packed), numbers=numbers, texts=["", "a", "é" * 100], nothing=[], floats=[1.0])
    features = parse_example(data, "here")
    assert int_values(data, features["numbers"], "here") == numbers
    texts = [data[start:end].decode() for start, end in bytes_values(data, features["texts"], "here")]
    assert texts == ["", "a", "é" * 100]
    assert {name: feature.kind for name, feature in features.items()} == {
        "numbers": "ints",
        "texts": "bytes",
        "nothing": "bytes" if features["nothing"].lists else None,
        "floats": "floats",
    }


def test_messages_are_merged_as_protobuf_does():
    first, second = encode(a=[1], b=["old"]), encode(b=["new"], c=[2])
    data = first + b"\x7a\x03abc" + second + b"\x10\x05"  # with unknown fields between and behind
    merged = Example.FromString(data)
    features = parse_example(data, "here")
    assert sorted(features) == sorted(merged.features.feature)
    assert [data[slice(*span)] for span in bytes_values(data, features["b"], "here")] == [b"new"]
    assert list(merged.features.feature["b"].bytes_list.value) == [b"new"]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"label": [5]}, ("5",)),
        ({"label": [-1]}, ()),
        ({"label": [3, 1, 3]}, ("3", "1")),
        ({"label": ["cat"]}, ("cat",)),
        ({"label": [""]}, ()),
        ({"label": []}, ()),
        ({"labels": ["cat", "dog"], "image__class__text": ["x"]}, ("cat", "dog")),
        ({"image__class__text": ["cat, tame"]}, ("cat, tame",)),
    ],
)
def test_labels(tmp_path, features, expected):
    file = write(tmp_path / "x", encode(image=[b"i"], **features))
    assert listed(file) == [("x/000000000", expected, b"i")]
    assert listed(file, unlabelled=True) == [("x/000000000", (), b"i")]


def test_fields_that_people_name(tmp_path):
    file = write(tmp_path / "x", encode(image=[b"i"], thumb=[b"t"], label=[1], species=["cat"]))
    assert listed(file, image="thumb", label="species") == [("x/000000000", ("cat",), b"t")]
    with pytest.raises(RecipeError, match=r"'y'.*image, label, species, thumb"):
        listed(file, label="y")
    with pytest.raises(RecipeError, match=r"\blabel\b.*image, other\b.*--unlabelled"):
        listed(write(tmp_path / "y", encode(image=[b"i"], other=[1])))
    with pytest.raises(RecipeError, match="--image-field"):
        listed(write(tmp_path / "z", encode(label=[1])))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image": [b"i"]}, "record 1 .*'label'"),
        ({"label": [1]}, "record 1 .*'image'"),
        ({"image": [b"a", b"b"], "label": [1]}, "record 1 .*\\b2 values"),
        ({"image": [1, 2], "label": [1]}, "record 1 .*ints"),
        ({"image": [b"i"], "label": [0.5]}, "record 1 .*floats"),
        ({"image": [b"i"], "label": [-2]}, "record 1 .* label -2"),
    ],
)
def test_records_that_are_no_sample(tmp_path, features, message):
    with pytest.raises(DataError, match=message):
        listed(write(tmp_path / "x", encode(image=[b"i"], label=[1]), encode(**features)))


def test_empty_files(tmp_path):
    files = [write(tmp_path / "x-0"), write(tmp_path / "x-1", encode(image=[b"i"], label=[1]))]
    assert [item.key for item in listed(*files)] == ["x-1/000000000"]
    with pytest.raises(DataError, match="source"):
        listed(files[0])


def test_every_damaged_byte_is_noticed(tmp_path):
    records = [encode(image=[bytes([i]) * 20], label=[i]) for i in range(3)]
    content = framed(*records)
    path = tmp_path / "x"
    second = len(framed(records[0]))
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(DataError, match=rf"record {position // second} .*\b{position // second * second:,}\b"):
            listed(str(path))
    for end in range(1, len(content)):
        if end % second:
            path.write_bytes(content[:end])
            with pytest.raises(DataError, match=f"record {end // second} "):
                listed(str(path))


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_lengths_that_cannot_be(tmp_path):
    length = struct.pack("<Q", 1 << 50)
    (tmp_path / "x").write_bytes(length + masked(length) + b"short")
    with pytest.raises(DataError, match=r"record 0 .*1,125,899,906,842,624"):
        listed(str(tmp_path / "x"))


def test_records_are_counted_in_compressed_files_too(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(framed(*RECORDS)))
    with open_records(str(tmp_path / "x.gz")) as file:
        assert count_records(file, "x") == len(RECORDS)


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\xff", b"\x0b", b"\x02\x00", b"\x80" * 11, b"\x0a\x02\x0a\x05", b"\x09a"]
)
def test_records_that_are_no_example(tmp_path, data):
    with pytest.raises(DataError, match=r"record 0.*tf\.train\.Example"):
        listed(write(tmp_path / "x", data))


def test_other_damage(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(framed(*RECORDS))[:-20])
    with pytest.raises(DataError, match=r"x\.gz"):
        listed(str(path))
    with pytest.raises(DataError, match="absent"):
        listed(str(tmp_path / "absent"))
    path.write_text("this is a text")
    with pytest.raises(DataError, match="TFRecord"):
        listed(str(path))
