import json
from collections import Counter
from pathlib import Path

import pytest
import webdataset as wds
from messages import refusal
from small_files import write_tar
from test_tar_sources import listed
from webdataset.tariterators import base_plus_ext

from data_tools.sources.source import SourceOptions
from data_tools.sources.tar import open_tars
from data_tools.sources.webdataset import WebDatasetSource, sample_name
from vitscale.ground.errors import DataError, RecipeError


def test_shards_of_the_webdataset_library(tmp_path):
    with wds.ShardWriter(str(tmp_path / "train-%04d.tar"), maxcount=4, verbose=0) as sink:
        for i in range(10):
            image = b"\xff\xd8image %d" % i
            sink.write({"__key__": f"folder.d/{i:05d}", "jpg": image, "cls": i % 3 - 1, "txt": "a caption"})
    paths = sorted(tmp_path.glob("train-*.tar"))
    assert len(paths) == 3
    peer = wds.WebDataset([str(path) for path in paths], shardshuffle=False)
    expected = []
    for sample in peer:
        number = int(sample["cls"])
        key = f"{Path(sample['__url__']).stem}/{sample['__key__']}.jpg"
        expected.append((key, () if number == -1 else (str(number),), sample["jpg"]))
    ignored: Counter[str] = Counter()
    assert listed(*paths, ignored=ignored) == expected and len(expected) == 10
    assert ignored == {"neither image nor label of its sample": 10}


def test_compressed_shards_of_the_library(tmp_path):
    path = tmp_path / "a.tar.gz"
    with wds.TarWriter(str(path)) as sink:
        sink.write({"__key__": "one", "webp": b"image", "json": {"label": ["cat", "dog"], "caption": "x"}})
        sink.write({"__key__": "two", "json": {"label": 5}, "png": b"other"})
    assert listed(path) == [("a/one.webp", ("cat", "dog"), b"image"), ("a/two.png", ("5",), b"other")]


@pytest.mark.parametrize(
    "path", ["1.jpg", "a/1.jpg", "a.b/1.jpg", "a/1.seg.PNG", "./a/b.c.d", "1", "a.b/1", "n0144_1.JPEG", "a b.jpg"]
)
def test_names_of_samples_are_those_of_the_library(path):
    name, extension = base_plus_ext(path)
    assert sample_name(path)[1] == "" if name is None else sample_name(path) == (name, extension.lower())


def shard(path: Path, **files: bytes | str | dict | list) -> Path:
    """A shard of one sample, its files by extension (__ for a dot)."""
    texts = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in files.items()}
    members = {name: text.encode() if isinstance(text, str) else text for name, text in texts.items()}
    return write_tar(path, *((f"x/7.{name.replace('__', '.')}", content) for name, content in members.items()))


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        *(({"cls": "7\n"}, ("7",)), ({"cls": "007"}, ("7",)), ({"cls": "-1"}, ())),
        *(({"cls": " golden retriever\n"}, ("golden retriever",)), ({"cls": "[3, 1]"}, ("3", "1"))),
        *(({"cls": "7", "json": {"label": 8}}, ("7",)), ({"json": {"label": 8, "labels": 9}}, ("8",))),
        ({"json": {"label": None, "class": "dog"}}, ()),  # one field for all samples
        *(({"json": {"labels": ["dog", 3]}}, ("dog", "3")), ({"json": {"labels": []}}, ())),
        ({"json": {"cls": -1}}, ()),
    ],
)
def test_labels(tmp_path, files, labels):
    assert listed(shard(tmp_path / "s-0.tar", jpg=b"image", **files)) == [("s-0/x/7.jpg", labels, b"image")]
    # The image may also come last.
    assert listed(shard(tmp_path / "s-0.tar", **files, jpg=b"image")) == [("s-0/x/7.jpg", labels, b"image")]


def test_named_fields(tmp_path):
    labels = {"cls": "7", "cls__txt": "other", "json": {"fine": "cat", "label": 9}}
    path = shard(tmp_path / "a.tar", seg__png=b"s", jpg=b"image", **labels)
    named = {"image_field": "jpg"}
    assert listed(path, **named) == [("a/x/7.jpg", ("7",), b"image")]
    assert listed(path, image_field=".seg.PNG") == [("a/x/7.seg.png", ("7",), b"s")]
    for field, label in (("fine", ("cat",)), ("label", ("9",)), ("cls.txt", ("other",)), ("cls", ("7",))):
        assert listed(path, label_field=field, **named) == [("a/x/7.jpg", label, b"image")]
    assert listed(path, unlabelled=True, **named) == [("a/x/7.jpg", (), b"image")]


@pytest.mark.parametrize(
    ("files", "options"),
    [
        *(({"cls": ""}, {}), ({"cls": "-2"}, {}), ({"cls": "a\nb"}, {}), ({"cls": b"\xff"}, {}), ({"cls": "[1"}, {})),
        *(({"json": "{"}, {}), ({"json": "[" * 10**5}, {}), ({"json": [1]}, {})),
        *(({"json": {"caption": "c", "url": "u"}}, {}), ({"json": {"label": 1.5}}, {})),
        *(({"json": {"label": True}}, {}), ({"json": {"label": {"a": 1}}}, {}), ({"json": {"label": [0, 0, 1]}}, {})),
        *(({"json": {"label": [-1, 1]}}, {}), ({"json": {"label": 1}}, {"label_field": "fine"})),
        *(({"txt": "caption"}, {"label_field": "fine"}), ({"cls": "7", "seg__png": b"s"}, {})),
        ({"cls": "7"}, {"image_field": "png"}),
    ],
)
def test_samples_that_are_not_understood(tmp_path, files, options):
    path = shard(tmp_path / "s-0.tar", jpg=b"image", **files)
    with refusal(DataError, "webdataset", f"{str(files)[:60]} {options}", {path: "SHARD"}) as caught:
        listed(path, **options)
    assert str(caught.value).startswith(f"{path}: sample")


def test_what_belongs_to_no_sample(tmp_path):
    first = ("__info__.json", b"{}"), "README", ("1.jpg", b"image"), ("1.cls", b"3"), ("._1.jpg", b"mac")
    others = ("2.cls", b"3"), ("2.txt", b"no image"), ("./3.cls", b"4"), ("./3.JPEG", b"other")
    path = write_tar(tmp_path / "a.tar", *first, *others)
    ignored: Counter[str] = Counter()
    assert listed(path, ignored=ignored) == [("a/1.jpg", ("3",), b"image"), ("a/3.JPEG", ("4",), b"other")]
    assert ignored == {"hidden": 2, "neither image nor label of its sample": 2, "sample without an image": 1}


def test_files_of_a_sample_that_do_not_follow_each_other(tmp_path):
    """The library would give images without labels; a label that is there is not to be lost."""
    path = write_tar(tmp_path / "a.tar", ("1.jpg", b"x"), ("2.jpg", b"x"), ("1.cls", b"1"), ("2.cls", b"2"))
    with pytest.raises(DataError, match=r"sample '1'.*\bjpg\b"):
        listed(path)
    with pytest.raises(DataError, match=r"sample '1'.*'jpg'"):
        listed(write_tar(path, ("1.jpg", b"x"), ("1.cls", b"1"), ("1.JPG", b"y")))


def kind_of(path: Path, **options: str) -> type:
    return type(open_tars("SRC", [str(path)], SourceOptions(**options)))


def test_what_a_webdataset_is(tmp_path):
    path = tmp_path / "a.tar"
    assert kind_of(shard(path, jpg=b"", cls="1")) is WebDatasetSource
    assert kind_of(shard(path, json={}, jpg=b"")) is WebDatasetSource
    assert kind_of(shard(path, jpg=b"", txt="caption")) is not WebDatasetSource
    assert kind_of(path, image_field="jpg") is WebDatasetSource
    # One remark beside the folders makes none.
    assert kind_of(write_tar(path, "cat/1.jpg", "dog/1.json", "info.json")) is not WebDatasetSource
    with pytest.raises(DataError, match=r"\.caption"):
        listed(shard(path, jpg=b"", txt="caption"), label_field="caption")


def test_a_list_of_labels_instead(tmp_path):
    path = write_tar(tmp_path / "a.tar", "2.jpg", ("2.json", b'{"caption": 1}'), "1.jpg", ("1.json", b"{}"))
    labels = tmp_path / "labels.csv"
    labels.write_text("1,cat\n2,dog|owl\n")
    assert listed(path, labels=str(labels)) == [("2.jpg", ("dog", "owl"), b"2.jpg"), ("1.jpg", ("cat",), b"1.jpg")]
    with pytest.raises(RecipeError, match=r"--labels .*absent\.txt"):
        open_tars("SRC", [str(path)], SourceOptions(labels=str(tmp_path / "absent.txt")))
    with pytest.raises(RecipeError, match=r"2 tars.*one tar"):
        listed(path, path, labels=str(labels))
    for field in ("image", "label"):
        with pytest.raises(RecipeError, match=f"--{field}-field x"):
            listed(path, labels=str(labels), **{f"{field}_field": "x"})


def test_the_first_look_is_bounded(tmp_path):
    path = write_tar(tmp_path / "a.tar", *(f"cat/{i}.jpg" for i in range(5000)))
    with path.open("r+b") as file:  # damage far behind
        file.seek(4000 * 1024)
        file.write(b"?" * 512)
    source = open_tars("SRC", [str(path)], SourceOptions())
    with pytest.raises(DataError, match="4,096,000"):
        list(source.items(0, Counter()))


def test_labels_of_endless_size(tmp_path):
    path = write_tar(tmp_path / "a.tar", ("1.jpg", bytes(10)), ("1.cls", bytes(17 << 20)))
    with pytest.raises(DataError, match=r"'1\.cls'.*17,825,792.*16,777,216"):
        listed(path)
